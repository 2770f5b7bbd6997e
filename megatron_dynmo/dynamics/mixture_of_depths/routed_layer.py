"""Run a Megatron layer on the tokens that its router chose.

Tier: Megatron. With sequence parallelism a rank holds a part of each sequence. Only the logits of
all tokens and the chosen tokens cross ranks; the layer then has a shorter sequence in equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils import make_viewless_tensor

from megatron_dynmo.dynamics.mixture_of_depths.heads import agreement, prediction_loss, with_loss
from megatron_dynmo.dynamics.mixture_of_depths.token_routing import (
    Chosen,
    LocalTokens,
    choose_above,
    choose_top,
    mixed,
    num_slots,
    pick_pairs,
    pick_positions,
)
from megatron_dynmo.errors import ConfigError

ROUTER, PREDICTOR = "mod_router", "mod_predictor"
# Matrix products in eight bits want token counts of this multiple.
_EIGHT_BIT_MULTIPLE = 16


@dataclass(frozen=True)
class Rules:
    """How tokens are chosen and what is made of the choice.

    Attributes:
        capacity: share of the tokens of a sequence.
        is_causal: whether the predictor decides, token by token, and not the router.
        is_weighted: whether the router weighs what the layer adds.
        predictor_coeff: weight of the predictor's loss in the gradient.
    """

    capacity: float
    is_causal: bool
    is_weighted: bool
    predictor_coeff: float


@dataclass(frozen=True)
class Outcome:
    """What one forward pass counts, over this rank's part of the tokens.

    Attributes:
        num_tokens: tokens seen.
        num_chosen: those that went through the layer.
        num_right: choices that the predictor foretold; None where it was not asked.
        loss: the predictor's loss, summed over tokens; None where it was not asked.
    """

    num_tokens: int
    num_chosen: int
    num_right: torch.Tensor | None = None
    loss: torch.Tensor | None = None


def token_multiple(parts: int, is_eight_bit: object) -> int:
    """What the number of chosen tokens of a sequence must be a multiple of.

    Args:
        parts: tensor-parallel ranks that share them.
        is_eight_bit: FP8 or FP4, if any.
    """
    return parts * (_EIGHT_BIT_MULTIPLE if is_eight_bit else 1)


def run_routed(
    layer: Any, inner: Callable[..., Any], rules: Rules, kwargs: Mapping[str, Any]
) -> tuple[Any, Outcome]:
    """Run a layer on the chosen tokens.

    Args:
        layer: has a router and perhaps a predictor as modules.
        inner: the layer itself.
        rules: how tokens are chosen.
        kwargs: arguments of `TransformerLayer.forward`, by name.

    Returns:
        What `TransformerLayer.forward` returns, hidden states in new memory; and the counts.

    Raises:
        ConfigError: The layer is called in a way in which tokens cannot be left out.

    Collective:
        The tensor-parallel group.
    """
    _require_plain(kwargs)
    hidden = kwargs["hidden_states"]
    parts = _SequenceParts(layer, hidden)
    chosen = _choose(layer, rules, parts)
    here = LocalTokens(chosen, parts.start, parts.length)
    before = here.take(hidden)
    output, context = inner(
        **{
            **kwargs,
            "hidden_states": parts.divide(here.spread(before)),
            **_of_chosen(kwargs, chosen),
        }
    )
    after = here.collect(parts.join(output))
    weight = getattr(layer, ROUTER).weigh(before) if rules.is_weighted else None
    merged = here.put(hidden, mixed(before, after, weight))
    outcome = Outcome(hidden.shape[0] * hidden.shape[1], here.num_tokens)
    if layer.training and torch.is_grad_enabled() and hasattr(layer, PREDICTOR):
        merged, outcome = _teach(layer, rules, parts, chosen, merged, outcome)
    # The pipeline frees outputs in place, which a view would not allow.
    merged = make_viewless_tensor(merged, requires_grad=merged.requires_grad, keep_graph=True)
    return (merged, context), outcome


class _SequenceParts:
    """How a sequence is divided over tensor-parallel ranks, if it is.

    Args:
        layer: the layer.
        hidden: [length, b, h], what the layer was called with.

    Attributes:
        start: place in the sequence of the first token here.
        length: tokens of each sample here.
        multiple: what the number of chosen tokens must be a multiple of.
    """

    def __init__(self, layer: Any, hidden: torch.Tensor) -> None:
        self._group: dist.ProcessGroup = layer.pg_collection.tp
        self._is_divided = layer.config.sequence_parallel and self._group.size() > 1
        self.hidden = hidden
        self.length = hidden.shape[0]
        self.start = self._group.rank() * self.length if self._is_divided else 0
        self.multiple = token_multiple(
            self._group.size() if self._is_divided else 1, layer.config.fp8 or layer.config.fp4
        )

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [s, b] of the whole sequence, bit for bit the same on all ranks.

        Args:
            logits: [length, b] of this rank's part.
        """
        if self._is_divided:
            return gather_from_sequence_parallel_region(
                logits, tensor_parallel_output_grad=False, group=self._group
            )
        if self._group.size() > 1:
            # Each rank has computed them, but a last bit that differs would choose other tokens.
            dist.broadcast(logits, group=self._group, group_src=0)
        return logits

    def divide(self, short: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [k / ranks, b, h] of what all ranks put into [k, b, h]."""
        if not self._is_divided:
            return short
        return reduce_scatter_to_sequence_parallel_region(short, group=self._group)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Return [k, b, h] of all ranks' parts; undoes `divide`."""
        if not self._is_divided:
            return part
        return gather_from_sequence_parallel_region(part, group=self._group)


def _choose(layer: Any, rules: Rules, parts: _SequenceParts) -> Chosen:
    with torch.no_grad():
        head = getattr(layer, PREDICTOR if rules.is_causal else ROUTER)
        logits = parts.whole(head(parts.hidden))
    if rules.is_causal:
        return choose_above(logits, multiple_of=parts.multiple)
    return choose_top(logits, num_slots(logits.shape[0], rules.capacity, parts.multiple))


def _teach(
    layer: Any,
    rules: Rules,
    parts: _SequenceParts,
    chosen: Chosen,
    merged: torch.Tensor,
    outcome: Outcome,
) -> tuple[torch.Tensor, Outcome]:
    """Let the predictor learn what the router chose."""
    logits = getattr(layer, PREDICTOR)(parts.hidden)
    is_chosen = chosen.mask()[parts.start : parts.start + parts.length]
    loss = prediction_loss(logits, is_chosen)
    config = layer.config
    scaled = rules.predictor_coeff * loss
    if not config.calculate_per_token_loss:
        # As the main loss: the mean over the micro-batch. Otherwise gradients are divided later.
        scaled = scaled / (chosen.seq_length * logits.shape[1])

    def scale(one: torch.Tensor) -> torch.Tensor:
        if config.grad_scale_func is not None:
            one = config.grad_scale_func(one)
        return one if config.calculate_per_token_loss else one / get_num_microbatches()

    counted = Outcome(
        outcome.num_tokens,
        outcome.num_chosen,
        agreement(logits.detach(), is_chosen),
        loss.detach(),
    )
    return with_loss(merged, scaled, scale), counted


def _of_chosen(kwargs: Mapping[str, Any], chosen: Chosen) -> dict[str, Any]:
    """The arguments that have an entry for each token, for the chosen ones only."""
    found: dict[str, Any] = {}
    if kwargs.get("attention_mask") is not None:
        found["attention_mask"] = pick_pairs(kwargs["attention_mask"], chosen)
    if kwargs.get("padding_mask") is not None:
        found["padding_mask"] = kwargs["padding_mask"].gather(1, chosen.positions.t())
    rotary = kwargs.get("rotary_pos_emb")
    if isinstance(rotary, tuple):
        found["rotary_pos_emb"] = tuple(
            None if table is None else pick_positions(table, chosen) for table in rotary
        )
    elif rotary is not None:
        found["rotary_pos_emb"] = pick_positions(rotary, chosen)
    return found


def _require_plain(kwargs: Mapping[str, Any]) -> None:
    for name, why in (
        ("packed_seq_params", "packed sequences have no sample of which tokens could be chosen"),
        ("inference_context", "its cache expects keys and values of every token in every layer"),
        ("attention_bias", "a bias between tokens is not known how to be cut"),
        ("context", "cross attention is not known how to be cut"),
    ):
        if kwargs.get(name) is not None:
            raise ConfigError(f"--dynmo-mod cannot run a layer with {name}: {why}")
