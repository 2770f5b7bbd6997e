"""What the trigger learns from moves: what one costs, how long one stays good, which ones failed.

Tier: pure.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

__all__ = ["FailedMoves", "MoveCost", "PlanLives"]

_KEPT = 8
_GUESS_BYTES_PER_S = 1e9
_GUESS_ITERATIONS = 2.0
_GUESS_ITERATIONS_UNKNOWN_SIZE = 5.0
_LONGEST_BACK_OFF_DOUBLINGS = 10


class MoveCost:
    """Wall time of a move from its bytes, learned from the moves that were made."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, float]] = []

    def learn(self, num_bytes: int, cost_ms: float) -> None:
        """Take note of a move."""
        self._samples.append((int(num_bytes), float(cost_ms)))
        del self._samples[:-_KEPT]

    def estimate(self, num_bytes: int, iteration_ms: float) -> tuple[float, str]:
        """Expected ms of a move, and where the number comes from.

        Each earlier move votes: half of its time is taken as fixed, half as following the bytes;
        the median counts. Before the first move the guess is deliberately high.

        Args:
            num_bytes: bytes to be sent; 0 when unknown.
            iteration_ms: time of an iteration now.
        """
        if self._samples:
            votes = [
                ms * (0.5 + 0.5 * num_bytes / size) if size and num_bytes else ms
                for size, ms in self._samples
            ]
            count = len(votes)
            return statistics.median(votes), f"learned from {count} move{'s' * (count > 1)}"
        if num_bytes:
            guess = _GUESS_ITERATIONS * iteration_ms + 1e3 * num_bytes / _GUESS_BYTES_PER_S
            return guess, (
                f"guess: {_GUESS_ITERATIONS:.0f} iterations + {num_bytes / 1e9:.2g} GB at "
                f"{_GUESS_BYTES_PER_S / 1e9:.0f} GB/s"
            )
        guess = _GUESS_ITERATIONS_UNKNOWN_SIZE * iteration_ms
        return guess, f"guess: {_GUESS_ITERATIONS_UNKNOWN_SIZE:.0f} iterations"

    def state(self) -> list[list[float]]:
        """Everything, as JSON can hold it."""
        return [list(sample) for sample in self._samples]

    def restore(self, state: list[list[float]]) -> None:
        """Take over what `state` returned."""
        self._samples = [(int(size), ms) for size, ms in state]


class PlanLives:
    """How long plans stayed better than what they replaced, and so how long the next may.

    Until a plan has ended there is no reason to expect the next one to. Afterwards a gain counts
    for the rest of a median life, or for as long as it has already been there to take, if that is
    more. So a change that has lasted until it cost as much as a move is always answered, and one
    that goes away before that never: whatever the load does, at most twice the least possible is
    lost.
    """

    def __init__(self) -> None:
        self._lives: list[int] = []
        self._gain_since: int | None = None

    def end(self, life: int) -> None:
        """A plan turned worse than what it had replaced, this many iterations after the move."""
        self._lives.append(max(life, 1))
        del self._lives[:-_KEPT]

    def see_gain(self, is_there: bool, since: int) -> None:
        """Take note whether a window shows something to gain; `since` is where it begins."""
        if not is_there:
            self._gain_since = None
        elif self._gain_since is None:
            self._gain_since = since

    @property
    def median(self) -> float | None:
        """Median life in iterations; None until a plan ended."""
        return statistics.median(self._lives) if self._lives else None

    def horizon(self, iteration: int, remaining: int) -> float:
        """Iterations for which the gain of a move now may be counted."""
        if self.median is None:
            return remaining
        age = 0 if self._gain_since is None else iteration - self._gain_since
        return min(remaining, max(self.median - age, age))

    def state(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {"lives": self._lives, "gain_since": self._gain_since}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self._lives, self._gain_since = list(state["lives"]), state["gain_since"]


class FailedMoves:
    """Layouts that were tried in vain, each barred for twice as long as the time before."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, int]] = {}
        self.in_a_row = 0

    def add(self, layout: str, iteration: int, base: int) -> None:
        """Bar a layout: for `base` iterations the first time, then twice, four times ..."""
        count = self._failed.get(layout, (0, 0))[0] + 1
        self._failed[layout] = (count, iteration + self.back_off(base, count - 1))
        self.in_a_row += 1

    def barred_until(self, layout: str, iteration: int) -> int | None:
        """Iteration after which a layout may be tried again; None when it may be now."""
        until = self._failed.get(layout, (0, 0))[1]
        return until if iteration < until else None

    @staticmethod
    def back_off(base: int, doublings: int) -> int:
        """`base` doubled so many times, within reason."""
        return int(math.ldexp(base, min(doublings, _LONGEST_BACK_OFF_DOUBLINGS)))

    def state(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        failed = {layout: list(entry) for layout, entry in self._failed.items()}
        return {"failed": failed, "in_a_row": self.in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self._failed = {layout: (c, until) for layout, (c, until) in state["failed"].items()}
        self.in_a_row = state["in_a_row"]
