"""The floating-point operations of an iteration whose layers the dynamics have made cheaper.

Megatron counts every layer in full, so a run that skips work would seem to be faster than it is.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron_dynmo.dynamics.layer_work import is_moe_layer

Count = Callable[[Namespace], float]


def less_skipped(count: Count, args: Namespace, work: Sequence[tuple[float, float]]) -> float:
    """Return the operations of an iteration without those that dynamics leave out.

    Args:
        count: Megatron's formula, of the model that arguments describe.
        args: validated.
        work: by layer, what is left of the forward and of the backward.
    """
    total = count(args)
    of_kind: dict[bool, float] = {}
    for number, (forward, backward) in enumerate(work, start=1):
        left = (forward + 2 * backward) / 3
        if left == 1:
            continue
        is_moe = is_moe_layer(args, number)
        if is_moe not in of_kind:
            of_kind[is_moe] = _of_layer(count, args, number)
        total -= (1 - left) * of_kind[is_moe]
    return total


def _of_layer(count: Count, args: Namespace, layer_number: int) -> float:
    """Operations of one layer: what another one like it would add."""
    more: Any = copy.copy(args)
    more.num_layers = args.num_layers + 1
    if args.num_experts is not None:
        pattern = [int(is_moe_layer(args, n)) for n in range(1, args.num_layers + 1)]
        # In front, since the last one also says what multi-token prediction is made of.
        more.moe_layer_freq = [int(is_moe_layer(args, layer_number)), *pattern]
    return count(more) - count(args)
