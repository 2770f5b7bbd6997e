"""Around Megatron's training loop: a rank leaves it, sleeps, and enters it again.

The loop keeps how far it is in local variables, so a rank that comes back calls it anew, with the
arguments of a resumed run. What the loop does before its first step involves all ranks of the
world; the rank is still alone in its own then, and meets the others in that step.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.training.global_vars import get_args, get_timers

from megatron_dynmo.adapters import wrapper
from megatron_dynmo.elastic.meeting import Go
from megatron_dynmo.errors import MigrationError
from megatron_dynmo.leaving import LeavesTraining


def train_or_park(original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any) -> Any:
    """Train, and while this rank is packed away, sleep.

    Args:
        original: Megatron's `train`.
        controller: follows the run.
        *args: of `train`.
        **kwargs: of `train`.

    Returns:
        What `train` returns.

    Raises:
        SystemExit: Status 0, on a rank that is packed away when training ends or that is to exit.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    with contextlib.ExitStack() as quiet:
        try:
            while True:
                try:
                    return original(*call.args, **call.kwargs)
                except LeavesTraining as leave:
                    go = _wait(leave)
                if go is None:
                    raise SystemExit(0)
                # In its own world this rank is the first, which would repeat the lines of a start.
                quiet.enter_context(contextlib.redirect_stdout(quiet.enter_context(_nowhere())))
                controller.come_back(go, quiet.close)
                _make_ready(call.arguments)
        finally:
            controller.end()


def _wait(leave: LeavesTraining) -> Go | None:
    try:
        return leave.wait()
    except RuntimeError as gone:
        raise MigrationError(
            f"the ranks that train cannot be heard any more ({gone}): this parked rank ends too"
        ) from gone


def _nowhere() -> Any:
    return open(os.devnull, "w", encoding="utf-8")


def _make_ready(call: dict[str, Any]) -> None:
    """Put what the loop expects at its start as it expects it."""
    model = call["model"]
    call["config"].no_sync_func = None
    wrapper.resume_hooks(model, [ddp.use_forward_hook for ddp in model])
    get_timers()("interval-time", log_level=0).reset()
    update_num_microbatches(get_args().consumed_train_samples, consistency_check=False)
