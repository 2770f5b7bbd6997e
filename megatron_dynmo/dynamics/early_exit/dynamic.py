"""Early exit: tokens leave before the last layer, and later layers compute the others only."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.early_exit import exiting
from megatron_dynmo.dynamics.early_exit import support as exit_support
from megatron_dynmo.dynamics.early_exit.exiting import Remaining
from megatron_dynmo.dynamics.early_exit.head import ExitHead
from megatron_dynmo.dynamics.early_exit.remaining_layer import run_remaining
from megatron_dynmo.dynamics.early_exit.tally import Tally, layer_shares
from megatron_dynmo.dynamics.protocol import Dynamic, LayerFactors, Step
from megatron_dynmo.dynamics.side_channel import SideChannel
from megatron_dynmo.errors import ConfigError

# Column of the side channel: 1 once a token has left. The class of the next token follows, low
# byte first, where there are heads.
_EXITED = 0
# Survivors must differ by this much before costs are announced anew.
_ANNOUNCED_CHANGE = 0.05


class EarlyExit(Dynamic):
    """Decides after some layers which tokens leave, and spares later layers those that have left.

    A token that has left keeps its hidden state up to the final layer norm; every later layer
    computes its key and value from it. The decision looks at the token alone, so that no token
    learns of later ones.
    """

    kind = "early_exit"

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        super().__init__(config, args)
        self._schedule = config.early_exit_schedule
        self._first = config.early_exit_min_layer or max(args.num_layers // 2, 1)
        self._num_layers = args.num_layers
        self._has_heads = config.early_exit == "confidence"
        num_bytes = 1 if config.early_exit_classes <= 256 else 2
        self._num_class_bytes = num_bytes if self._has_heads else 0
        self._channel = SideChannel(1 + self._num_class_bytes, self._first_columns)
        self._now: int | None = None
        self._tally = Tally(args.num_layers)
        self._shares = layer_shares(args, config.early_exit_classes if self._has_heads else 0)
        self._announced = [1.0] * args.num_layers
        self._mean = [1.0] * args.num_layers

    @classmethod
    def refusals(cls, config: DynMoConfig, args: Namespace) -> list[str]:
        """See `Dynamic.refusals`."""
        return exit_support.refusals(config, args)

    @property
    def _threshold(self) -> float:
        if self._now is None:  # evaluation of a checkpoint, before or without any training
            return self._schedule.at(int(getattr(self.args, "iteration", 0) or 0) + 1)
        return self._schedule.at(self._now)

    def _is_exit(self, layer_number: int) -> bool:
        """Whether tokens may leave after a layer."""
        past = layer_number - self._first
        return (
            past >= 0
            and past % self.config.early_exit_every == 0
            and not self._is_last(layer_number)
        )

    def _is_last(self, layer_number: int) -> bool:
        return layer_number == self._num_layers

    def attach(self, chunks: Sequence[Any]) -> None:
        """Open the side channel between the stages."""
        self._channel.attach(chunks)

    def shape(self, layer: Any) -> None:
        """Give a layer after which tokens may leave its head."""
        if self._has_heads and self._is_exit(layer.layer_number):
            layer.exit_head = ExitHead(layer, self.config.early_exit_classes)

    # ---------------------------------------------------------------- one layer

    def forward(self, layer: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Dynamic.forward`; the layer's `context` holds the columns of the side channel."""
        hidden, columns = kwargs["hidden_states"], kwargs["context"]
        if columns is None:
            raise ConfigError(
                "--dynmo-early-exit: the model runs without the side channel that tells layers "
                "which tokens have left; train it through megatron_dynmo.pretrain_gpt or dynmo run"
            )
        remaining = self._remaining(layer, columns)
        if remaining is None:
            output, _ = inner(*args, **kwargs)
        elif len(remaining):
            computed = run_remaining(
                layer, hidden, remaining, kwargs.get("rotary_pos_emb"), kwargs["attention_mask"]
            )
            output = remaining.place(hidden, computed)
        else:
            output = exiting.keep_in_graph(hidden, list(layer.parameters()))
        if layer.training:
            seen = hidden.shape[0] * hidden.shape[1]
            self._tally.computed(
                layer.layer_number, seen if remaining is None else remaining.num_mine, seen
            )
        if self._may_leave_after(layer) and (remaining is None or len(remaining)):
            output, columns = self._exit(layer, hidden, output, columns)
        self._channel.latest = columns
        return output, columns

    def _may_leave_after(self, layer: Any) -> bool:
        """Whether a layer has anything to decide; a head learns while none leaves, too."""
        return self._is_exit(layer.layer_number) and (self._has_heads or self._threshold <= 1)

    def _remaining(self, layer: Any, columns: torch.Tensor) -> Remaining | None:
        """Who is left to compute; None when nobody has left."""
        if layer.layer_number <= self._first:
            return None
        exited = columns[..., _EXITED]
        rank, size = 0, 1
        if layer.config.sequence_parallel:
            group = layer.pg_collection.tp
            rank, size = group.rank(), group.size()
            parts = [torch.empty_like(exited) for _ in range(size)]
            dist.all_gather(parts, exited.contiguous(), group=group)
            exited = torch.cat(parts)
        remaining = Remaining.of(exited.bool(), rank, size)
        return remaining if len(remaining) < exited.numel() else None

    def _exit(
        self, layer: Any, before: torch.Tensor, after: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let tokens leave after a layer.

        Returns:
            The layer's output, with the head's loss attached, and the columns after the layer.
        """
        exited = columns[..., _EXITED].flatten()
        rows = torch.nonzero(exited == 0).flatten()
        tokens = after.flatten(0, 1).index_select(0, rows)
        if self._has_heads:
            logits = layer.exit_head(tokens)
            sure = exiting.confidence(logits, self.config.early_exit_measure)
            if layer.training and torch.is_grad_enabled():
                after = self._with_loss(layer, after, logits, columns, rows)
        else:
            sure = exiting.saturation(before.flatten(0, 1).index_select(0, rows), tokens)
        leaves = (sure >= self._threshold).to(torch.uint8)
        if not layer.config.sequence_parallel and layer.pg_collection.tp.size() > 1:
            # The ranks have the same numbers up to what their kernels make of them; one decides.
            group = layer.pg_collection.tp
            dist.broadcast(leaves, src=dist.get_global_rank(group, 0), group=group)
        columns = columns.clone()
        columns[..., _EXITED] = exited.index_copy(0, rows, leaves).view(columns.shape[:2])
        return after, columns

    def _with_loss(
        self,
        layer: Any,
        after: torch.Tensor,
        logits: torch.Tensor,
        columns: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Attach the head's loss: cross entropy of the next token's class, of remaining tokens.

        The last position of a sequence has no next token on this stage.
        """
        length, batch = columns.shape[:2]
        config = layer.config
        tp_rank, parts = 0, 1
        if config.sequence_parallel:
            tp_rank, parts = layer.pg_collection.tp.rank(), layer.pg_collection.tp.size()
        positions = rows // batch + tp_rank * length
        classes = columns[..., 1:].flatten(0, 1).index_select(0, rows).long()
        labels = (classes << 8 * torch.arange(classes.shape[1], device=classes.device)).sum(1)
        labels = labels.masked_fill(positions == parts * length - 1, -100)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100)
        num_labels = (parts * length - 1) * batch
        self._tally.lost(layer.layer_number, loss.detach(), num_labels / parts)
        weight = self.config.early_exit_loss_weight
        if not config.calculate_per_token_loss:
            weight /= num_labels * get_num_microbatches()
        scale = torch.full((), weight, dtype=torch.float32, device=loss.device)
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale).reshape(())
        return exiting.attach_loss(after, loss, scale)

    def _first_columns(self, tokens: torch.Tensor) -> torch.Tensor:
        """The columns of a micro-batch before the first layer: nobody has left."""
        batch, length = tokens.shape
        columns = torch.zeros(
            *(length, batch, self._channel.num_columns), dtype=torch.uint8, device=tokens.device
        )
        if self._has_heads:
            classes = tokens.t()[1:] % self.config.early_exit_classes
            for place in range(self._num_class_bytes):
                columns[:-1, :, 1 + place] = (classes >> 8 * place & 255).to(torch.uint8)
        if self.args.sequence_parallel:
            parts = mpu.get_tensor_model_parallel_world_size()
            return columns.chunk(parts)[mpu.get_tensor_model_parallel_rank()].contiguous()
        return columns

    # ---------------------------------------------------------------- one step

    def begin_iteration(self, iteration: int) -> None:
        """See `Dynamic.begin_iteration`."""
        self._now = iteration
        self._tally.clear()

    def after_step(self, step: Step) -> Mapping[str, Any] | None:
        """Add up the survivors of all ranks and announce costs when they have changed."""
        threshold = self._threshold
        self._now = step.iteration + 1  # an evaluation may follow, as it would after a resume
        self._tally.merge(step.run.topology.device)
        survivors = self._tally.survivors()
        self._mean = [(old + new) / 2 for old, new in zip(self._mean, survivors, strict=True)]
        changes = (abs(a - b) for a, b in zip(self._mean, self._announced, strict=True))
        if max(changes) < _ANNOUNCED_CHANGE:
            return None
        self._announced = [round(mean, 4) for mean in self._mean]
        return {
            "exited_fraction": [round(1 - survivor, 4) for survivor in survivors],
            "threshold": threshold,
        }

    def factors(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.factors`."""
        share = self._shares.of(
            self._announced[layer_number - 1], has_exit=self._is_exit(layer_number)
        )
        return LayerFactors(share, share)

    def counters(self) -> Mapping[str, float]:
        """Survivors and exit losses, by layer."""
        return self._tally.counters()

    def state(self) -> Any:
        """See `Dynamic.state`."""
        return {"announced": self._announced, "mean": self._mean, "heads": self._heads}

    @property
    def _heads(self) -> dict[str, int] | None:
        """What the layers' heads depend on."""
        if not self._has_heads:
            return None
        config = self.config
        return {
            "classes": config.early_exit_classes,
            "min-layer": self._first,
            "every": config.early_exit_every,
        }

    def take_up(self, state: Any) -> None:
        """See `Dynamic.take_up`."""
        if (heads := state.get("heads", self._heads)) != self._heads:
            names = {"confidence": heads} if heads else {"saturation": None}
            raise ConfigError(
                f"the checkpoint's exit heads are those of --dynmo-early-exit {_text(names)}, this "
                f"run's of {_text({self.config.early_exit: self._heads})}; give the flags that it "
                "was saved with"
            )
        announced, mean = ([float(x) for x in state[name]] for name in ("announced", "mean"))
        if not len(announced) == len(mean) == self._num_layers:
            raise ConfigError(
                f"the checkpoint's state of early exit is of {len(announced)} layers, the model "
                f"has {self._num_layers}; give the same --num-layers"
            )
        self._announced, self._mean = announced, mean


def _text(heads: Mapping[Any, dict[str, int] | None]) -> str:
    """The kind and the settings of its heads, as flags are written."""
    ((kind, settings),) = heads.items()
    words = [f"--dynmo-early-exit-{name} {value}" for name, value in (settings or {}).items()]
    return " ".join([str(kind), *words])


DYNAMIC = EarlyExit
