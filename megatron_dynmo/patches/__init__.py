"""The monkey-patches of Megatron, declared as data; behaviour is in adapters and the controller.

Imported only by `megatron_dynmo.enable`, `dynmo patches` and `dynmo doctor`.
"""

from __future__ import annotations

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.patching.spec import PatchSpec


def all_specs() -> tuple[PatchSpec, ...]:
    """Return every patch of Megatron that some configuration applies, the CPU layer's last."""
    from megatron_dynmo.cpu import cpu_specs
    from megatron_dynmo.patches import (
        buckets,
        checkpoint_fixes,
        elastic,
        emulation,
        freezing,
        layers,
        numerics,
        schedules,
        side_channel,
        training,
    )

    return (
        *training.specs(),
        *schedules.specs(),
        *layers.specs(),
        *freezing.specs(),
        *side_channel.specs(),
        *buckets.specs(),
        *numerics.specs(),
        *elastic.specs(),
        *checkpoint_fixes.specs(),
        *emulation.specs(),
        *cpu_specs(),
    )


def specs_for(config: DynMoConfig, *, on_cpu: bool) -> tuple[PatchSpec, ...]:
    """Return the patches that one configuration applies.

    Args:
        config: the settings; mode `off` patches nothing of ours.
        on_cpu: whether the run is to do without CUDA, which needs the CPU layer in every mode.
    """
    from megatron_dynmo.patches import (
        buckets,
        checkpoint_fixes,
        elastic,
        freezing,
        layers,
        numerics,
        schedules,
        side_channel,
        training,
        wheel_fixes,
    )

    chosen: tuple[PatchSpec, ...] = ()
    if config.mode != "off":
        chosen += training.specs() + schedules.specs()
    if config.dynamics:
        chosen += layers.specs()
    if "freezing" in config.dynamics:
        chosen += freezing.specs()
    if "early_exit" in config.dynamics:
        chosen += side_channel.specs()
    if config.follows_layers:
        chosen += buckets.specs() + numerics.specs()
    if config.packs:
        chosen += elastic.specs()
    if config.mode != "off" or on_cpu:
        chosen += checkpoint_fixes.specs()
    if config.emulate is not None:
        from megatron_dynmo.patches import emulation

        chosen += emulation.specs()
    if on_cpu:
        from megatron_dynmo.cpu import cpu_specs

        return chosen + cpu_specs()
    return chosen + (wheel_fixes.specs() if config.mode != "off" else ())
