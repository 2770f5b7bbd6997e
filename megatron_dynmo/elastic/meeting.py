"""What the ranks that train and those that are parked tell each other, through torch's store.

Parked ranks are in no process group: they look at the store now and then, and sleep in between. The
first rank of the training writes numbered messages that all parked ranks read in order:

- `call`: these ranks are wanted. Each of them says that it is there; then comes
- `go`: come, with what has to be known, or `off`: somebody was missing, stay; or
- `end`: training is over.

So a parked rank that has died holds nobody up: it is missed before anything has changed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Go", "Host", "Parked", "Store"]

_LOOK_EVERY_S = 0.2  # a parked rank: a rejoin takes that much longer at most
_POLL_EVERY_S = 0.01  # the host, while all of training waits


class Store(Protocol):
    """The part of torch's stores that is used here."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there; does not wait."""


@dataclass(frozen=True)
class Go:
    """The order to come back.

    Attributes:
        message: number of the message, for the next wait.
        state: what the host had to say.
    """

    message: int
    state: dict[str, Any]


class Host:
    """The side of the ranks that train; every one has it, the first rank alone writes.

    Args:
        store: shared by all ranks.
        writes: whether this is the first rank.
    """

    def __init__(self, store: Store, writes: bool) -> None:
        self._store = store
        self._writes = writes
        self.message = 0

    def call(self, ranks: Sequence[int], wait_s: float) -> tuple[int, ...]:
        """Ask parked ranks to come back and wait for their answers.

        Args:
            ranks: numbers at the start of the job.
            wait_s: how long.

        Returns:
            The ranks that did not answer; for ranks that do not write always none. Go on with `go`
            or `off`.
        """
        self._say({"kind": "call", "ranks": list(ranks)})
        missing = {rank: _here(self.message, rank) for rank in ranks if self._writes}
        deadline = time.monotonic() + wait_s
        while missing and time.monotonic() < deadline:
            missing = {rank: key for rank, key in missing.items() if not self._store.check([key])}
            if missing:
                time.sleep(_POLL_EVERY_S)
        return tuple(missing)

    def go(self, state: dict[str, Any]) -> None:
        """Have the ranks that were called come."""
        self._say({"kind": "go", "state": state})

    def off(self) -> None:
        """Have the ranks that were called stay."""
        self._say({"kind": "off"})

    def end(self) -> None:
        """Let all parked ranks leave."""
        self._say({"kind": "end"})

    def have_left(self, ranks: Iterable[int], generation: int) -> bool:
        """Whether ranks that exit have said so."""
        return self._store.check([_left(generation, rank) for rank in ranks])

    def _say(self, what: dict[str, Any]) -> None:
        self.message += 1
        if self._writes:
            self._store.set(_said(self.message), json.dumps(what))


class Parked:
    """The side of a rank that was packed away.

    Args:
        store: shared by all ranks.
        rank: its number at the start of the job.
        message: number of the last message before it left.
    """

    def __init__(self, store: Store, rank: int, message: int) -> None:
        self._store = store
        self._rank = rank
        self._message = message

    def wait(self, sleep: Callable[[float], None] = time.sleep) -> Go | None:
        """Sleep until this rank is to come back; None when training is over."""
        called = False
        while True:
            said = self._next(sleep)
            kind = said["kind"]
            if kind == "end":
                return None
            if kind == "go" and called:
                return Go(self._message, said["state"])
            called = kind == "call" and self._rank in said["ranks"]
            if called:
                self._store.set(_here(self._message, self._rank), "yes")

    def leave(self, generation: int) -> None:
        """Say that this rank exits now."""
        self._store.set(_left(generation, self._rank), "yes")

    def _next(self, sleep: Callable[[float], None]) -> dict[str, Any]:
        key = _said(self._message + 1)
        while not self._store.check([key]):
            sleep(_LOOK_EVERY_S)
        self._message += 1
        what: dict[str, Any] = json.loads(self._store.get(key))
        return what


def _said(message: int) -> str:
    return f"say/{message}"


def _here(message: int, rank: int) -> str:
    return f"here/{message}/{rank}"


def _left(generation: int, rank: int) -> str:
    return f"left/{generation}/{rank}"
