"""The patch registry: declare a patch as data, check it, apply all or none, undo exactly."""

from megatron_dynmo.patching.patch_set import (
    MARKER,
    PatchRecord,
    PatchSet,
    activate,
    active,
    deactivate,
    patched,
)
from megatron_dynmo.patching.spec import Kind, PatchSpec, Problem

__all__ = [
    "MARKER",
    "Kind",
    "PatchRecord",
    "PatchSet",
    "PatchSpec",
    "Problem",
    "activate",
    "active",
    "deactivate",
    "patched",
]
