"""Drop-in for Megatron's `pretrain_gpt.py`, with layers that move.

    torchrun ... -m megatron_dynmo.pretrain_gpt ARGS

takes every argument of `pretrain_gpt.py@core_v0.19.0` and the `--dynmo-*` flags, and prints the
same losses. Megatron is imported only after it is patched, so the pieces that the script is known
for (`forward_step` and so on) are looked up when asked for.
"""

from __future__ import annotations

import time

# Megatron reports how long the start took, from before the heavy imports.
_PROGRAM_START_TIME = time.time()

import importlib  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

from megatron_dynmo import launch  # noqa: E402

_PIECES = {
    "forward_step": "megatron_dynmo.adapters.gpt_step",
    "get_batch": "megatron_dynmo.adapters.gpt_step",
    "loss_func": "megatron_dynmo.adapters.gpt_step",
    "get_embedding_ranks": "megatron_dynmo.adapters.gpt_stages",
    "train_valid_test_datasets_provider": "megatron_dynmo.adapters.gpt_data",
}


def __getattr__(name: str) -> Any:
    """Import a piece of the training script when it is asked for."""
    if name in _PIECES:
        return getattr(importlib.import_module(_PIECES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(argv: Sequence[str] | None = None) -> None:
    """Train a GPT.

    Args:
        argv: The words after the program's name; by default those of this process. Megatron reads
            `sys.argv` itself, so any other value replaces it there.

    Raises:
        SystemExit: Status 2 after a mistake in the flags; else what Megatron leaves with.
    """
    if argv is not None:
        sys.argv[1:] = argv
    with launch.one_line_errors():
        launch.start()
        _train()


def _train() -> None:
    """Parse Megatron's arguments and run its training loop."""
    from megatron.core.enums import ModelType
    from megatron.core.package_info import __version__ as megatron_version
    from megatron.core.utils import get_te_version, get_torch_version
    from megatron.training import (
        inprocess_restart,
        pretrain,
        print_rank_0,
        set_startup_timestamps,
    )
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_dynmo.adapters import gpt_data, gpt_stages, gpt_step, modelopt

    if not launch.is_rank_0():
        _silence_warnings()
    print_rank_0(f"> PyTorch version ................ {get_torch_version()}")
    print_rank_0(f"> Megatron-Core version .......... {megatron_version}")
    print_rank_0(f"> Transformer Engine version ... {get_te_version()}")
    set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=time.time())

    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(
        extra_args_provider=modelopt.add_arguments,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    modelopt.enable(args)
    if modelopt.is_used(args):
        model_config = gpt_config_from_args(args, model_config_cls=modelopt.model_config_class())
    else:
        model_config = gpt_config_from_args(args)
    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        gpt_data.train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        gpt_step.forward_step,
        store=store,
        get_embedding_ranks=gpt_stages.get_embedding_ranks,
    )


def _silence_warnings() -> None:
    """Show the usual warnings of libraries once, on rank 0, and not on every rank.

    Some libraries reset the filters, so the way in which a warning is shown is replaced too.
    """
    noise = (UserWarning, FutureWarning, DeprecationWarning)
    for category in noise:
        warnings.filterwarnings("ignore", category=category)
    show = warnings.showwarning

    def show_others(
        message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any
    ) -> None:
        if not issubclass(category, noise):
            show(message, category, *args, **kwargs)

    warnings.showwarning = show_others


if __name__ == "__main__":
    main()
