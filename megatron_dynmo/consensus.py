"""Agreement of all ranks: did everybody succeed, does everybody mean the same thing.

Tier: torch. Only fixed-size tensors are exchanged; no pickle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_dynmo.errors import DynMoError, PeerGaveUp

_TEXT_BYTES = 240
_MAX_TEXTS = 8  # one failure can make many ranks give up
_CAUSE, _CONSEQUENCE = 1, 2


class Consensus:
    """Agreement over one group.

    Args:
        device: where the group's collectives take their tensors.
        world: group that must agree; None for all ranks.
    """

    def __init__(self, device: torch.device, world: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._world = world

    def failures(self, error: Exception | None) -> str:
        """Return who failed and why, the same text on every rank; empty when nobody did.

        Ranks that only gave up because another one did come last.

        Args:
            error: what went wrong on this rank, or None.

        Collective:
            All ranks of the world group.
        """
        text = "" if error is None else _one_line(error)
        mine = torch.zeros(1 + _TEXT_BYTES, dtype=torch.uint8)
        if error is not None:
            mine[0] = _CONSEQUENCE if isinstance(error, PeerGaveUp) else _CAUSE
        raw = text.encode()[:_TEXT_BYTES]
        if raw:
            mine[1 : 1 + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        found = []
        for rank, row in enumerate(self._gather(mine)):
            if row[0]:
                said = bytes(row[1:].tolist()).rstrip(b"\0").decode(errors="replace")
                found.append((int(row[0]), rank, said))
        texts = [f"rank {rank}: {said}" for _, rank, said in sorted(found)]
        if len(texts) > _MAX_TEXTS:
            texts[_MAX_TEXTS:] = [f"and {len(texts) - _MAX_TEXTS} more ranks"]
        return "; ".join(texts)

    def require_same(self, text: str, what: str) -> None:
        """Raise on every rank unless all ranks give the same text.

        Collective:
            All ranks of the world group.

        Raises:
            DynMoError: Names the ranks that differ from rank 0.
        """
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8
        )
        rows = self._gather(digest)
        differ = [rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
        if differ:
            raise DynMoError(
                f"ranks disagree on the {what}: {differ} differ from rank 0. "
                "All ranks must run the same versions with the same arguments"
            )

    def total(self, value: int) -> int:
        """Sum of a number over all ranks.

        Collective:
            All ranks of the world group.
        """
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, group=self._world)
        return int(tensor.item())

    def slowest(self, value: float) -> float:
        """Largest value of all ranks, the same on every rank: a time, say, that each measured.

        Collective:
            All ranks of the world group.
        """
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._world)
        return float(tensor.item())

    def least(self, value: float) -> float:
        """Smallest value of all ranks, the same on every rank: free memory, say.

        Collective:
            All ranks of the world group.
        """
        return -self.slowest(-value)

    def of_rank_0(self, values: Sequence[int]) -> list[int]:
        """What rank 0 gives, on every rank; every rank gives equally many.

        Collective:
            All ranks of the world group.
        """
        tensor = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        dist.broadcast(tensor, src=0, group=self._world)
        return [int(value) for value in tensor.tolist()]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        mine = mine.to(self._device)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._world))]
        dist.all_gather(rows, mine, group=self._world)
        return [row.cpu() for row in rows]


def _one_line(error: Exception) -> str:
    name = type(error).__name__
    lines = str(error).splitlines()
    return f"{name}: {lines[0]}" if lines else name
