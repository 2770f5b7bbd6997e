"""How a rank that was packed away gets out of Megatron's training loop, and back into it."""

from __future__ import annotations

from collections.abc import Callable

from megatron_dynmo.elastic.meeting import Go


class LeavesTraining(BaseException):
    """This rank trains no longer; not an error, and nobody but the way in is to catch it.

    Attributes:
        wait: sleeps until the rank is wanted again; None when training is over, or when this rank
            is to exit.
    """

    def __init__(self, wait: Callable[[], Go | None]) -> None:
        super().__init__("this rank was packed away")
        self.wait = wait
