"""Dynamic load balancing for Megatron-LM.

Importing this package imports neither torch nor Megatron and changes nothing; `enable` does.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from megatron_dynmo.version import __version__

if TYPE_CHECKING:
    from megatron_dynmo.config import DynMoConfig
    from megatron_dynmo.patching import PatchRecord

__all__ = ["__version__", "disable", "enable", "patch_status"]

logger = logging.getLogger(__name__)


def enable(config: DynMoConfig | None = None) -> None:
    """Patch Megatron in this process, all patches or none.

    Call it before Megatron's model is built, on every rank. The same settings again are a no-op.

    Args:
        config: the settings; the defaults balance.

    Raises:
        ConfigError: --dynmo-device cuda on a machine without CUDA, or Megatron is not installed.
        PatchError: Megatron does not look as the patches expect; lists every problem.
    """
    from megatron_dynmo import patching
    from megatron_dynmo.config import DynMoConfig

    config = config or DynMoConfig()
    require_megatron()
    on_cpu = _runs_on_cpu(config.device)
    if on_cpu:
        _use_cpu_arguments()
    from megatron_dynmo.patches import specs_for

    patches = patching.PatchSet(specs_for(config, on_cpu=on_cpu))
    if config.mode != "off" and patches.controller is None:
        from megatron_dynmo.controller import Controller

        patches.controller = Controller(config, patches)
    patching.activate(patches)


def require_megatron() -> None:
    """Answer in one line where Megatron or torch is missing.

    Raises:
        ConfigError: Names the package and how to install it.
    """
    from megatron_dynmo.errors import ConfigError

    for package in ("torch", "megatron.core"):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            raise ConfigError(f"{package} is not installed: pip install 'megatron-core[training]'")


def disable() -> None:
    """Undo every patch exactly; without one, do nothing.

    Raises:
        PatchConflict: Somebody patched on top of ours; nothing is changed.
    """
    from megatron_dynmo import patching

    patching.deactivate()


def patch_status() -> list[PatchRecord]:
    """Return one record for each patch in force."""
    from megatron_dynmo import patching

    active = patching.active()
    return active.status() if active is not None else []


def _runs_on_cpu(device: str) -> bool:
    """Decide between CUDA and the CPU layer."""
    import torch

    from megatron_dynmo.errors import ConfigError

    if device == "cpu":
        return True
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError(
            "--dynmo-device cuda: torch sees no CUDA device here; use --dynmo-device auto or cpu"
        )
    return not has_cuda


def _use_cpu_arguments() -> None:
    """Add the Megatron flags that a CPU run needs to the command line."""
    import sys

    from megatron_dynmo.cpu.arguments import cpu_argument_defaults

    sys.argv += cpu_argument_defaults(sys.argv[1:])
