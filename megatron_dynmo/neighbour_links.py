"""What ranks of a line tell each other: neighbour to neighbour, and along the whole line.

Tier: torch, not Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynmo.transport import Parcel, Transport

__all__ = ["Message", "NeighbourLinks"]

type Message = dict[str, Any]
"""JSON-able values."""


class NeighbourLinks:
    """Messages to and from the ranks next to this one.

    Args:
        group: the line; belongs to the caller.
        device: where the group takes its tensors.
        timeout_s: for one message.

    Attributes:
        rank: this one's place in the line.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.rank, self._last = dist.get_rank(group), len(ranks) - 1
        self._group, self._device = group, device
        self._transport = Transport(group, ranks, device, timeout_s=timeout_s)

    def has(self, peer: int) -> bool:
        """Whether there is such a rank."""
        return 0 <= peer <= self._last

    def tell(self, peer: int, message: Message) -> None:
        """Send to a neighbour, which must `hear`.

        Raises:
            PeerLost: it failed or did not answer in time.
        """
        self._transport.send(Parcel("the balance", values=message), peer)

    def hear(self, peer: int) -> Message:
        """Receive what a neighbour tells.

        Raises:
            PeerLost: it failed or did not answer in time.
        """
        return self._transport.receive("the balance", peer, {}).values

    def along_the_line(
        self, told: Message, merge: Callable[[Message, Message], Message]
    ) -> Message:
        """Merge what every rank tells, from the first to the last, and let all know the result.

        Collective:
            All ranks of the line; each one sends to its neighbours only.
        """
        if self.has(self.rank - 1):
            told = merge(self.hear(self.rank - 1), told)
        if self.has(self.rank + 1):
            self.tell(self.rank + 1, told)
            told = self.hear(self.rank + 1)
        if self.has(self.rank - 1):
            self.tell(self.rank - 1, told)
        return told

    def gather(self, number: int) -> list[int]:
        """The number of every rank.

        Collective:
            All ranks of the group, one all-gather.
        """
        mine = torch.tensor([number], dtype=torch.int64, device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self._last + 1)]
        dist.all_gather(rows, mine, group=self._group)
        return [int(row) for row in rows]
