"""One rank's side of a move, on Megatron's model, wrapper and optimizer."""

from __future__ import annotations

import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.training.async_utils import maybe_finalize_async_save

from megatron_dynmo.adapters import model as models
from megatron_dynmo.adapters import wrapper
from megatron_dynmo.adapters.kept_masters import KeptMasters
from megatron_dynmo.adapters.layer_state import (
    extra_checksum,
    extra_states,
    module_types,
    saved_buffers,
    set_extra_states,
    states_in,
    weights,
)
from megatron_dynmo.adapters.layout import install_layout, live_layout
from megatron_dynmo.adapters.optimizer import (
    ParamState,
    StateCodec,
    rebuild_optimizer,
    release_parameters,
)
from megatron_dynmo.adapters.reform import Reformed, Replaced, reform
from megatron_dynmo.adapters.topology import Topology
from megatron_dynmo.checksum import checksum
from megatron_dynmo.errors import ConservationError, MigrationError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.plan import LayerMove, MigrationPlan
from megatron_dynmo.stage import unit_name
from megatron_dynmo.transport import Parcel


@dataclass
class _Incoming:
    """A layer on its way in: built, perhaps filled, not attached."""

    layer: Any
    parcel: Parcel | None = None


@dataclass
class _Pending:
    """What a move has prepared on this rank and can still be dropped."""

    hooks_on: list[bool] = field(default_factory=list)
    incoming: dict[int, _Incoming] = field(default_factory=dict)
    states: list[tuple[torch.nn.Parameter, ParamState]] = field(default_factory=list)


class MegatronStage:
    """Layers, wrapper and optimizer of this rank.

    Args:
        topology: this rank's place.
        model: Megatron's `model` list.
        optimizer: Megatron's ChainedOptimizer.
        args: Megatron's arguments.
        dynamics: the run's `Dynamics`; None without any.

    Attributes:
        new_tensors: see `Stage`.
        late_tensors: see `Stage`.
        num_reforms: how often wrapper and optimizer were rebuilt because parameters changed.
    """

    new_tensors = ("state/", "extra/")
    late_tensors = ("state/",)

    def __init__(
        self,
        topology: Topology,
        model: Sequence[Any],
        optimizer: Any,
        args: Namespace,
        dynamics: Any = None,
    ) -> None:
        self._topology = topology
        self._model = model
        self._optimizer = optimizer
        self._args = args
        self._dynamics = dynamics
        self.chunks = models.chunks_of(model)
        self.config = models.model_config(model)
        self._codec: StateCodec | None = None
        self._pending = _Pending()
        self.num_reforms = 0

    @functools.cached_property
    def specs(self) -> list[Any]:
        """Spec of every decoder layer of the model.

        Raises:
            ConfigError: It cannot be told, so no layer can be built for a move.
        """
        return models.decoder_layer_specs(self.chunks[0], self._dynamics)

    @property
    def layout(self) -> LayerLayout:
        """The layout in force, read from the live layers of the pipeline.

        Collective:
            All ranks of the pipeline group.
        """
        return live_layout(self._topology, self.chunks, self.config.num_layers, self.config)

    def regroup(self, topology: Topology, layout: LayerLayout) -> None:
        """Go on under a layout for another number of stages, with the layers held now.

        Args:
            topology: this rank's new place.
            layout: in which this rank has the same layers as before.
        """
        self._topology = topology
        for config in (self.config, *(chunk.block.config for chunk in self.chunks)):
            install_layout(layout, config, self._args)
        self.check_ownership(layout)

    def codec(self) -> StateCodec:
        """Reader of the optimizer's state as it is now."""
        if self._codec is None:
            self._codec = StateCodec(self._optimizer)
        return self._codec

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Between two iterations, make `param.data` current for the length of a block.

        Collective:
            All ranks of the data-parallel group.
        """
        hooks_on = wrapper.hooks_on(self._model)
        try:
            wrapper.settle_parameters(self._model)
            yield
        finally:
            wrapper.resume_hooks(self._model, hooks_on)

    # ---------------------------------------------------------------- one move, phase by phase

    def prepare(self, plan: MigrationPlan) -> None:
        """See `Stage.prepare`."""
        self._pending = _Pending()
        maybe_finalize_async_save(blocking=True)
        self._codec = None
        self._require_unchanged_training()
        for move in plan.received_by(self._topology.pp_rank):
            layer = models.build_layer(
                self.chunks[move.dst_vp_stage],
                self.specs[move.layer_number - 1],
                move.layer_number,
                self._topology.pp_rank,
            )
            wrapper.tag_layer(layer)
            self._pending.incoming[move.layer_number] = _Incoming(layer)

    def settle(self) -> None:
        """See `Stage.settle`."""
        # Noted first, so that a gather that fails half-way is undone as well.
        self._pending.hooks_on = wrapper.hooks_on(self._model)
        wrapper.settle_parameters(self._model)

    def _require_unchanged_training(self) -> None:
        """Refuse a move while the wrapper and optimizer know other trainable parameters."""
        for chunk in self.chunks:
            wrapped: Any = chunk.ddp
            known = wrapped.param_to_bucket_group
            for name, param in chunk.core.named_parameters():
                if param.requires_grad != (param in known):
                    raise MigrationError(
                        f"{name} was {'thawed' if param.requires_grad else 'frozen'} after the "
                        "optimizer was built, which a move would make final"
                    )

    def parcel(self, layer_number: int) -> Parcel:
        """See `Stage.parcel`."""
        layer = self.layers()[layer_number]
        parcel = Parcel(unit_name(layer_number), weights(layer))
        for name, value in extra_states(layer):
            parcel.tensors[f"extra/{name}"] = value
        parcel.values = {
            "requires_grad": {},
            "shards": {},
            "scalars": {},
            "modules": module_types(layer),
            "extra": extra_checksum(parcel),
        }
        for name, param in layer.named_parameters():
            parcel.values["requires_grad"][name] = param.requires_grad
            state = self.codec().capture(param)
            if state is not None:
                parcel.values["shards"][name] = state.shard
                parcel.values["scalars"][name] = state.scalars
                for key, tensor in state.tensors.items():
                    parcel.tensors[f"state/{name}/{key}"] = tensor
        return parcel

    def slots(self, move: LayerMove) -> Mapping[str, torch.Tensor]:
        """See `Stage.slots`."""
        return weights(self._pending.incoming[move.layer_number].layer)

    def accept(self, move: LayerMove, parcel: Parcel) -> None:
        """See `Stage.accept`."""
        incoming = self._pending.incoming[move.layer_number]
        if move.is_local:
            for name, target in weights(incoming.layer).items():
                target.copy_(parcel.tensors[name])
        found, wanted = module_types(incoming.layer), parcel.values["modules"]
        if found != wanted:
            raise MigrationError(
                f"{parcel.label} was built from another spec here: "
                f"{sorted(set(found) ^ set(wanted))[:4]}"
            )
        if extra_checksum(parcel) != parcel.values["extra"]:
            raise MigrationError(f"extra state of {parcel.label} changed on its way")
        incoming.parcel = parcel
        for name, param in incoming.layer.named_parameters():
            param.requires_grad_(parcel.values["requires_grad"][name])

    def rollback(self) -> None:
        """See `Stage.rollback`."""
        if self._pending.hooks_on:
            wrapper.resume_hooks(self._model, self._pending.hooks_on)
        self._pending = _Pending()

    def commit(self, plan: MigrationPlan) -> None:
        """See `Stage.commit`."""
        pp_rank = self._topology.pp_rank
        leaving = {move.layer_number for move in plan.sent_by(pp_rank)}
        self._pending.states = self._staying_states(leaving)
        removed = [p for n in leaving for p in self.layers()[n].parameters()]
        arriving: dict[int, list[Any]] = {chunk.vp_stage: [] for chunk in self.chunks}
        for move in plan.received_by(pp_rank):
            arriving[move.dst_vp_stage].append(self._pending.incoming[move.layer_number].layer)
        # With virtual stages, a script's own model provider makes a config for each chunk.
        for config in (self.config, *(chunk.block.config for chunk in self.chunks)):
            install_layout(plan.new, config, self._args)
        self._codec = None
        release_parameters(self._optimizer)
        hooks_on = self._pending.hooks_on
        for index, chunk in enumerate(self.chunks):
            kept = [layer for layer in chunk.layers if layer.layer_number not in leaving]
            if len(kept) == len(chunk.layers) and not arriving[chunk.vp_stage]:
                wrapper.resume_hooks([chunk.ddp], [hooks_on[index]])
                continue
            layers = sorted(kept + arriving[chunk.vp_stage], key=lambda la: la.layer_number)
            models.set_layers(chunk, layers, self.config.num_layers)
            wrapper.rebuild(
                chunk.ddp,
                removed,
                disable_bucketing=wrapper.disables_bucketing(self._model, index, self._args),
                hooks_on=hooks_on[index],
            )

    def rebuild(self) -> None:
        """See `Stage.rebuild`."""
        for number, incoming in self._pending.incoming.items():
            assert incoming.parcel is not None, number
            self._pending.states += states_in(incoming.parcel, incoming.layer)
        rebuild_optimizer(
            self._optimizer, self._model, self._args, KeptMasters(self._pending.states)
        )
        self._codec = None

    def restore(self) -> None:
        """See `Stage.restore`."""
        for param, state in self._pending.states:
            self.codec().install(param, state)
        for incoming in self._pending.incoming.values():
            assert incoming.parcel is not None
            set_extra_states(incoming.layer, incoming.parcel)
        self._pending = _Pending()
        torch.cuda.empty_cache()

    def fingerprint(self, parcel: Parcel) -> int:
        """See `Stage.fingerprint`."""
        # Extra state is left out: modules may write it anew from what they loaded. It is compared
        # where it arrives.
        return checksum(
            tensor
            for name, tensor in sorted(parcel.tensors.items())
            if not name.startswith("extra/")
        )

    def fingerprints(self, without: Collection[int] = ()) -> dict[str, int]:
        """See `Stage.fingerprints`."""
        found = {
            unit_name(number): self.fingerprint(self.parcel(number))
            for number in self.layers()
            if number not in without
        }
        found["embedding and output"] = checksum(
            tensor for _, tensor in sorted(self._rest_tensors().items())
        )
        return found

    def check_ownership(self, layout: LayerLayout) -> None:
        """See `Stage.check_ownership`."""
        for chunk in self.chunks:
            found = tuple(chunk.layer_numbers)
            wanted = layout.layers_of(self._topology.pp_rank, chunk.vp_stage)
            if found != wanted:
                raise ConservationError(
                    f"virtual stage {chunk.vp_stage} holds layers {list(found)}, "
                    f"the plan was {list(wanted)}"
                )

    # ---------------------------------------------------------------- the state of this rank

    def reform(self, change: Callable[[], Replaced | None]) -> Reformed:
        """Let `change` freeze, thaw, replace or resize parameters of this rank's layers.

        See `megatron_dynmo.adapters.reform.reform`.

        Collective:
            All ranks of the world, in the same iteration.
        """
        return reform(self, change)

    def layers(self) -> dict[int, Any]:
        """Live layers of this rank by layer_number."""
        return {layer.layer_number: layer for chunk in self.chunks for layer in chunk.layers}

    def static_bytes(self) -> tuple[dict[int, int], int, int]:
        """Bytes of parameters, buffers, gradients, optimizer state and derived copies held here.

        Returns:
            {layer_number: bytes}, bytes of the embedding, bytes of everything else.
        """
        layers = {
            number: self.parcel(number).num_bytes
            + _gradient_bytes(layer.parameters())
            # What a dynamic's modules keep for computing and rebuild after a move.
            + sum(getattr(module, "dynmo_bytes_beside", 0) for module in layer.modules())
            for number, layer in self.layers().items()
        }
        ends = {True: 0, False: 0}
        for name, param in self.parameters_outside_layers():
            state = self.codec().capture(param)
            held = [param, *(state.tensors.values() if state else ())]
            size = sum(t.numel() * t.element_size() for t in held) + _gradient_bytes([param])
            ends[name.startswith("embedding.")] += size
        return layers, ends[True], ends[False]

    def parameters_outside_layers(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Embedding, output and final norm: parameters of this rank that belong to no layer.

        Names are those inside the GPTModel; no two chunks of a rank share one.
        """
        in_layers = {p for layer in self.layers().values() for p in layer.parameters()}
        for chunk in self.chunks:
            for name, param in chunk.core.named_parameters():
                if param not in in_layers:
                    yield name, param

    def tensors_outside_layers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters outside of the layers, and the buffers of a checkpoint there."""
        yield from self.parameters_outside_layers()
        for chunk in self.chunks:
            for name, buffer in saved_buffers(chunk.core):
                if not name.startswith("decoder.layers."):
                    yield name, buffer

    def _rest_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, held in self.tensors_outside_layers():
            tensors[name] = held.detach()
            if not isinstance(held, torch.nn.Parameter):
                continue
            state = self.codec().capture(held)
            for key, tensor in (state.tensors if state else {}).items():
                tensors[f"{name}/{key}"] = tensor
        return tensors

    def _staying_states(self, leaving: set[int]) -> list[tuple[torch.nn.Parameter, ParamState]]:
        """State of every parameter that stays, before the optimizer forgets it."""
        layers = self.layers()
        params = [p for n in layers if n not in leaving for p in layers[n].parameters()]
        params += [param for _, param in self.parameters_outside_layers()]
        captured = ((param, self.codec().capture(param)) for param in params)
        return [(param, state) for param, state in captured if state is not None]


def _gradient_bytes(params: Iterable[torch.nn.Parameter]) -> int:
    """Bytes of the gradient buffers that Megatron keeps for parameters."""
    grads = (getattr(param, "main_grad", None) for param in params)
    return sum(g.numel() * g.element_size() for g in grads if g is not None)
