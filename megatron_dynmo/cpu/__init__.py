"""Run real Megatron training on a machine without CUDA, over gloo.

Nothing here is imported where a GPU is used. Everything that gives way is declared as a
`PatchSpec`, so it is listed, checked, applied all or none and undone exactly.
"""

from megatron_dynmo.patching import PatchSpec


def cpu_specs() -> tuple[PatchSpec, ...]:
    """Return every patch that a CPU run needs, in the order in which they apply.

    They need no other patch set, and none of this package's flags: with `cpu.arguments` they are
    all that stock Megatron needs to train on a CPU. Imports torch and Megatron.
    """
    from megatron_dynmo.cpu.context_parallel import context_parallel_specs
    from megatron_dynmo.cpu.cuda_api import cuda_api_specs
    from megatron_dynmo.cpu.factories import factory_specs
    from megatron_dynmo.cpu.megatron_seams import seam_specs
    from megatron_dynmo.cpu.tensor_types import tensor_type_specs
    from megatron_dynmo.patches import wheel_fixes

    return (
        *factory_specs(),
        *cuda_api_specs(),
        *tensor_type_specs(),
        *seam_specs(),
        *context_parallel_specs(),
        *wheel_fixes.specs(),
    )
