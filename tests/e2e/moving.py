"""Be one rank of a run with megatron_dynmo in it, and look at the model after every step.

To be called through `tests.ranks.run_ranks`. Numbers come as exact text, never rounded.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.e2e.training import TINY_GPT, _pretrain, digests, exact

Watch = Callable[[int, list[Any], Any], Any]


def train_ours(
    rank: int, world_size: int, watch: Watch | None, fault: Callable[[int], None] | None, *argv: str
) -> dict[str, Any]:
    """Train as the drop-in does, with its flags.

    Args:
        rank: global rank.
        world_size: number of ranks.
        watch: called after every step, and after what the controller did then, with its 1-based
            number, the model and the optimizer; its answers are returned.
        fault: called once with the rank, before training, to break something on purpose.
        argv: words of the command line, after those of `TINY_GPT`; a later flag wins.

    Returns:
        What `tests.e2e.training.train` returns, and `watched`.

    Collective:
        Every rank, with the same words.
    """
    from megatron_dynmo import launch

    sys.argv = ["pretrain_gpt.py", *TINY_GPT, *argv]
    launch.start()
    if fault is not None:
        fault(rank)
    seen = _watch_steps(watch)
    _pretrain()
    return {
        "losses": [{k: exact(v) for k, v in step[0].items()} for step in seen["steps"]],
        # A step that overflowed has none.
        "grad_norms": [None if s[5] is None else exact(s[5]) for s in seen["steps"]],
        "watched": seen["watched"],
        **digests(seen["model"], seen["optimizer"]),
    }


def _watch_steps(watch: Watch | None) -> dict[str, Any]:
    from megatron.training import training

    seen: dict[str, Any] = {"steps": [], "watched": []}
    train_step = training.train_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        seen["model"], seen["optimizer"] = args[2], args[3]
        seen["steps"].append(result)
        if watch is not None:
            seen["watched"].append(watch(len(seen["steps"]), args[2], args[3]))
        return result

    training.train_step = watched
    return seen


def answers(
    rank: int, world_size: int, command_lines: Sequence[Sequence[str]]
) -> list[tuple[Any, str]]:
    """Start the drop-in with each command line in turn.

    Each but the last must be refused before Megatron has set anything up.

    Returns:
        The exit status (None after training to the end) and what was written to stderr, by line.
    """
    import megatron_dynmo
    from megatron_dynmo import launch, pretrain_gpt

    launch._wait_for_the_end = lambda limit_s: None  # no launcher ends this process
    found = []
    for words in command_lines:
        said, status = io.StringIO(), None
        with contextlib.redirect_stderr(said):
            try:
                pretrain_gpt.main([*TINY_GPT, *words])
            except SystemExit as stop:
                status = stop.code
        found.append((status, said.getvalue()))
        megatron_dynmo.disable()
    return found
