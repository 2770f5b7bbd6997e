"""What early exit did in a step, and what that makes a layer cost."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


class Tally:
    """Counts of one step by layer, of this rank until `merge` and of all ranks after it.

    Args:
        num_layers: of the whole model.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._counts: dict[int, list[float]] = {}
        self._losses: dict[int, list[torch.Tensor]] = {}
        self._rows: list[list[float]] = [[0.0] * 4 for _ in range(num_layers)]

    def clear(self) -> None:
        """Start a step."""
        self._counts.clear()
        self._losses.clear()

    def computed(self, layer_number: int, num_tokens: int, num_seen: int) -> None:
        """Note that a layer computed some of the tokens of a micro-batch."""
        counts = self._counts.setdefault(layer_number, [0.0, 0.0, 0.0])
        counts[0] += num_tokens
        counts[1] += num_seen

    def lost(self, layer_number: int, loss: torch.Tensor, num_labels: float) -> None:
        """Note the summed loss of a layer's head; stays on the device.

        Args:
            layer_number: of the layer.
            loss: a scalar.
            num_labels: tokens that a mean is taken over, those that have left earlier included.
        """
        self._counts[layer_number][2] += num_labels
        self._losses.setdefault(layer_number, []).append(loss.double())

    def merge(self, device: torch.device) -> None:
        """Add up what all ranks counted; keeps the last result when there was no training step.

        Args:
            device: where collectives take their tensors.

        Collective:
            All ranks of the world.
        """
        mine = torch.zeros(self._num_layers, 4, dtype=torch.float64)
        for number, counts in self._counts.items():
            mine[number - 1, :3] = torch.tensor(counts, dtype=torch.float64)
        mine = mine.to(device)
        for number, losses in self._losses.items():
            mine[number - 1, 3] = torch.stack(losses).sum()
        dist.all_reduce(mine)
        self._rows = mine.tolist()

    def survivors(self) -> list[float]:
        """Computed over all tokens, of each layer; 1 where nothing was counted."""
        return [computed / seen if seen else 1.0 for computed, seen, _, _ in self._rows]

    def counters(self) -> Mapping[str, float]:
        """Survivors of each layer and mean loss of each head."""
        found = {}
        for number, (_, seen, labels, loss) in enumerate(self._rows, start=1):
            if seen:
                found[f"survivors/layer_{number}"] = self.survivors()[number - 1]
            if labels:
                found[f"exit_loss/layer_{number}"] = loss / labels
        return found


@dataclass(frozen=True)
class LayerShares:
    """How the operations of a layer divide into those for all and for remaining tokens.

    Attributes:
        always: keys and values, as a share of the whole layer.
        remaining: everything else of the layer.
        head: the exit head, over the operations of the layer.
    """

    always: float
    remaining: float
    head: float

    def of(self, survivors: float, *, has_exit: bool) -> float:
        """Cost of a layer over that of the untouched layer."""
        if survivors >= 1 and not has_exit:
            return 1.0
        return self.always + survivors * (self.remaining + self.head * has_exit)


def layer_shares(args: Namespace, num_classes: int) -> LayerShares:
    """Count the multiplications of a layer for one token, by Megatron's arguments.

    Attention is counted over the whole sequence, as the local implementation computes it.

    Args:
        args: validated.
        num_classes: of exit heads; 0 without heads.
    """
    hidden = args.hidden_size
    width = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    keys = 2 * hidden * args.kv_channels * groups
    rest = 2 * hidden * width + 2 * args.seq_length * width
    rest += (3 if args.swiglu else 2) * hidden * args.ffn_hidden_size
    return LayerShares(
        keys / (keys + rest), rest / (keys + rest), hidden * num_classes / (keys + rest)
    )
