"""What a patch is: `PatchSpec`, its `Kind`, and the `Problem` that a guard finds.

Tier: pure (standard library and packaging). Guards are in `patch_guards`, `patching` applies.
"""

import enum
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from megatron_dynmo.errors import PatchError

_ADDRESS = re.compile(r"[\w.]+:[\w.]+")
_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Kind(enum.Enum):
    """How the replacement relates to the original."""

    WRAP = "wrap"
    """The replacement calls the original, so upstream may change inside it."""
    REPLACE = "replace"
    """The replacement takes over, so upstream must be exactly the source we read."""
    ADD = "add"
    """The attribute does not exist upstream."""


@dataclass(frozen=True)
class PatchSpec:
    """One patch, as data.

    Attributes:
        name: Unique, kebab-case.
        target: ``"module:qualname"``, such as ``"pkg.mod:function"`` or ``"pkg.mod:Class.method"``.
        kind: Wrap, replace or add; never inferred.
        factory: Original to replacement. Of a staticmethod, classmethod or property it receives the
            function inside (a property's getter) and returns a function; an ADD gets None. It must
            return a new object at each call for bindings made after apply to be recognised as ours
            on revert; an object that only the factory's own module holds counts as new.
        reason: What the patch is for.
        seam_tried: Which supported seam of upstream was considered and why it does not do.
        remove_when: What must happen upstream for the patch to go.
        params: Expected parameter names in order, without stars (``self`` and ``cls`` included);
            None for what has no signature.
        bindings: Every other ``"module:attr"`` that holds the same object. One whose module is not
            imported yet is left alone: it will pick the replacement up.
        requires: Requirement that the installed distribution must meet.
        digests: Version to sha256 of the target's source (`symbols.source_digest`). The installed
            version must be listed to REPLACE a Python function; a WRAP only warns if it differs.
        scan: Packages in which a binding that is not declared is an error. Elsewhere, as in a
            user's script, it is rebound and logged. The factory's own module is never touched.
    """

    name: str
    target: str
    kind: Kind
    factory: Callable[[Any], Any]
    reason: str
    seam_tried: str
    remove_when: str
    params: tuple[str, ...] | None = None
    bindings: tuple[str, ...] = ()
    requires: str = "megatron-core>=0.19,<0.20"
    digests: Mapping[str, str] = field(default_factory=dict, hash=False)
    scan: tuple[str, ...] = ("megatron",)

    def __post_init__(self) -> None:
        if not _KEBAB.fullmatch(self.name):
            raise PatchError(f"patch name {self.name!r} is not kebab-case")
        for address in self.addresses:
            if not _ADDRESS.fullmatch(address):
                raise PatchError(f'patch {self.name}: {address!r} is not "module:qualname"')
        for text in ("reason", "seam_tried", "remove_when"):
            if not getattr(self, text).strip():
                raise PatchError(f"patch {self.name}: {text} is empty; say it in one sentence")
        if self.kind is Kind.ADD and (self.bindings or self.params):
            raise PatchError(f"patch {self.name}: an ADD has neither bindings nor params")
        try:
            Requirement(self.requires)
        except InvalidRequirement as error:
            raise PatchError(f"patch {self.name}: requires={self.requires!r}: {error}") from error

    @property
    def addresses(self) -> tuple[str, ...]:
        """The target and the declared bindings."""
        return (self.target, *self.bindings)

    @property
    def factory_module(self) -> str:
        """Name of the module that defines the factory."""
        factory = self.factory
        while isinstance(factory, functools.partial):
            factory = factory.func
        return getattr(factory, "__module__", "")


@dataclass(frozen=True)
class Problem:
    """One way in which upstream does not look as a patch expects."""

    patch: str
    target: str
    kind: str
    expected: str
    found: str
    fix: str


def render(problems: Iterable[Problem]) -> str:
    """Write problems for a person; patches that share one problem are named together."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for problem in problems:
        same = (problem.kind, problem.expected, problem.found, problem.fix)
        groups.setdefault(same, []).append(f"{problem.patch} ({problem.target})")
    count = sum(len(names) for names in groups.values())
    lines = [f"{count} problem{'s' * (count != 1)}; nothing was changed"]
    for (kind, expected, found, fix), names in groups.items():
        lines += [f"- {kind}: {', '.join(names)}", f"    expected: {expected}"]
        lines += [f"    found:    {found}", f"    fix:      {fix}"]
    return "\n".join(lines)
