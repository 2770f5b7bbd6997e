"""Repairs of what megatron-core's wheel lacks, with or without a GPU."""

import importlib.util
from collections.abc import Callable

from megatron_dynmo.patching import Kind, PatchSpec


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches that let a run start from the wheel."""
    return (
        PatchSpec(
            name="wheel-compile-helpers",
            target="megatron.core.datasets.utils:compile_helpers",
            kind=Kind.WRAP,
            factory=_compile_if_missing,
            params=(),
            reason="the wheel holds helpers_cpp built but no Makefile, so `make` fails and exits",
            seam_tried="none: called unconditionally on rank 0",
            remove_when="upstream compiles only when the import fails",
        ),
    )


def _compile_if_missing(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap `compile_helpers` so that it compiles only what is not there yet."""

    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers
