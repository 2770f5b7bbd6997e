"""What the ways of pruning have in common."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

from megatron_dynmo.adapters import support
from megatron_dynmo.dynamics.protocol import LayerFactors
from megatron_dynmo.dynamics.pruning.replacement import Replacement


class PruningMethod(Protocol):
    """One way of pruning. What it has removed where is known on every rank.

    Attributes:
        num_layers: layers of the model.
    """

    num_layers: int

    def begin(self, run: Any) -> None:
        """Meet the model, built and loaded; see `Dynamic.begin`.

        Raises:
            ConfigError: What the flags or the checkpoint ask for cannot be computed here.

        Collective:
            All ranks of the world.
        """

    def weights_changed(self) -> None:
        """Take note that the values of parameters may be others than before."""

    def due(self, share: Fraction) -> int:
        """How much must go, on top of what has, for a share of all to be gone; 0 when enough is."""

    def prune(self, run: Any, amount: int) -> list[Replacement]:
        """Choose what goes, the same however the model is spread over ranks, and take it out.

        Args:
            run: the `MegatronRun`; its parameters are settled.
            amount: what `due` returned.

        Returns:
            The parameters of this rank that became smaller.

        Collective:
            All ranks of the world.
        """

    def shape(self, layer: Any) -> None:
        """See `Dynamic.shape`."""

    def factors(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.factors`."""

    def work(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.work`."""

    def sparsity(self, layer_number: int) -> float:
        """Share of a layer that is gone."""

    def details(self) -> Mapping[str, Any]:
        """What else the event of a step says."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state.

        Raises:
            ConfigError: It was made under settings that this method cannot go on from.
        """


# Megatron's argument, why nothing is pruned with it, and what to leave out.
_REFUSED = (
    (
        "num_experts",
        "the weights of experts are sharded and fused in ways of their own",
        "--num-experts or --dynmo-prune",
    ),
    (
        "multi_latent_attention",
        "multi-latent attention has other matrices",
        "--multi-latent-attention",
    ),
    (
        "heterogeneous_layers_config_path",
        "layers of different sizes have no common measure",
        "--heterogeneous-layers-config-path",
    ),
    (
        "mtp_num_layers",
        "layers of multi-token prediction are not pruned",
        "--mtp-num-layers",
    ),
)


def common_refusals(args: Namespace) -> list[str]:
    """Features of a run under which no parameter of a layer can become smaller.

    Args:
        args: Megatron's arguments, parsed but not validated.
    """
    # Wrapper and optimizer are rebuilt as after a move.
    refused = [f"{feature.flag}: {feature.reason}" for feature in support.refusals(args)]
    if getattr(args, "transformer_impl", "local") != "local":
        refused.append(
            "TransformerEngine keeps sizes and FP8 buffers of its layers in objects of its own; "
            "use --transformer-impl local"
        )
    refused += [
        f"{why}; leave out {flags}" for name, why, flags in _REFUSED if getattr(args, name, None)
    ]
    if getattr(args, "ckpt_format", "torch_dist") != "torch_dist" and getattr(args, "save", None):
        refused.append(
            f"--ckpt-format {args.ckpt_format} cannot hold layers of different sizes; use "
            "torch_dist"
        )
    if getattr(args, "optimizer", "adam") not in ("adam", "sgd"):
        refused.append(
            f"--optimizer {args.optimizer} works on whole matrices, whose state cannot be cut; use "
            "adam or sgd"
        )
    if getattr(args, "fp8", None) or getattr(args, "fp4", None):
        refused.append("FP8 and FP4 scale whole matrices by their history; leave them out")
    return refused


def listed(values: Sequence[Any], kind: type, length: int, what: str) -> list[Any]:
    """Check a list of a saved state.

    Raises:
        ValueError: It is not what was saved.
    """
    if len(values) != length or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{what} has {len(values)} entries, {length} are needed")
    return list(values)
