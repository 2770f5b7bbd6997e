"""Apply, list and undo monkey-patches; the public face of the patch registry.

Tier: pure (standard library and packaging). Which patches exist is said in `patches/`; what they do
is said by the code they call. A `PatchSet` is checked as a whole and applied as a whole: one symbol
that does not look as expected, and nothing is changed.
"""

import functools
import hashlib
import inspect
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from megatron_dynmo.errors import PatchConflict, PatchError
from megatron_dynmo.patching import guards, symbols
from megatron_dynmo.patching.guards import MARKER, Target
from megatron_dynmo.patching.spec import Kind, PatchSpec, Problem, render
from megatron_dynmo.patching.symbols import Binding

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

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PatchRecord:
    """What `PatchSet.status` says of one patch.

    Attributes:
        bindings: Places other than the target: those rebound if applied, else those declared.
        state: ``"applied"``, ``"overlaid"`` (applied, and somebody patched on top) or
            ``"not applied"``.
    """

    name: str
    kind: str
    target: str
    bindings: tuple[str, ...]
    state: str
    reason: str
    seam_tried: str
    remove_when: str
    requires: str


@dataclass(frozen=True, eq=False)
class _Edit:
    """One attribute to change, with all that is needed to change it back."""

    spec: PatchSpec
    place: Binding
    old: Any
    new: Any
    was_own: bool

    @property
    def is_intact(self) -> bool:
        return self.place.get() is self.new

    def undo(self) -> None:
        if self.was_own or not self.place.is_own:  # the latter: a module with computed attributes
            self.place.set(self.old)
        else:  # added by us, or inherited before
            self.place.delete()


class PatchSet:
    """Patches that are applied together or not at all.

    Attributes:
        specs: The patches, in the order of application.
        controller: The object that wrappers talk to; None lets them call straight through.
    """

    def __init__(self, specs: Iterable[PatchSpec]) -> None:
        """Collect the patches; changes nothing.

        Raises:
            PatchError: Two patches have the same name or the same target.
        """
        self.specs = tuple(specs)
        self.controller: Any = None
        self._targets: list[Target] = []
        self._edits: list[_Edit] = []
        self._late: _LateTable = {}
        for attribute in ("name", "target"):
            values = [getattr(spec, attribute) for spec in self.specs]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise PatchError(f"more than one patch has the {attribute} {', '.join(twice)}")

    @property
    def is_applied(self) -> bool:
        """Whether the patches are in force."""
        return bool(self._edits)

    def check(self) -> list[Problem]:
        """Return everything that is not as the patches expect; imports targets, changes nothing."""
        if not self.is_applied:
            return guards.find_targets(self.specs)[1]
        version = functools.cache(symbols.installed_version)
        problems = [
            problem
            for target in self._targets
            for problem in guards.guard(target.spec, target.raw, version)
        ]
        return problems + self._overlays()

    def apply(self) -> None:
        """Apply every patch; when applied already, do nothing.

        Raises:
            PatchError: Something is not as expected, or an attribute cannot be set. The text lists
                every problem; nothing is changed.
        """
        if self.is_applied:
            return
        targets, problems = guards.find_targets(self.specs)
        if problems:
            raise PatchError(render(problems))
        edits = _build_edits(targets)
        done: list[_Edit] = []
        try:
            for edit in edits:
                edit.place.set(edit.new)
                done.append(edit)
        except BaseException as error:
            for edit in reversed(done):
                edit.undo()
            if not isinstance(error, Exception):
                raise
            place = edits[len(done)].place.label
            raise PatchError(f"{place} cannot be set, nothing was changed: {error}") from error
        self._targets, self._edits = targets, edits
        self._late = _late_table(targets, edits)
        logger.debug("applied %d patches at %d places", len(targets), len(edits))
        for edit in edits:
            if edit.place.label not in edit.spec.addresses:
                # A name inside the target's own library is expected; one in a user's script is not.
                home, place = (a.partition(".")[0] for a in (edit.spec.target, edit.place.label))
                level = logging.DEBUG if home == place else logging.INFO
                logger.log(level, "%s is rebound too", edit.place.label)

    def revert(self) -> None:
        """Put every original back, last patch first; when not applied, do nothing.

        Modules imported since `apply` that bound one of our objects are found and restored too.

        Raises:
            PatchConflict: A place no longer holds our object; nothing is changed.
        """
        overlays = self._overlays()
        if overlays:
            raise PatchConflict(render(overlays))
        for edit in reversed(self._edits + self._late_edits()):
            edit.undo()
        self._targets, self._edits, self._late = [], [], {}

    def status(self) -> list[PatchRecord]:
        """Describe every patch, in the order of application."""
        edits: dict[str, list[_Edit]] = defaultdict(list)
        for edit in self._edits:
            edits[edit.spec.name].append(edit)
        records = []
        for spec in self.specs:
            bindings, state = spec.bindings, "not applied"
            if mine := edits[spec.name]:
                bindings = tuple(edit.place.label for edit in mine[1:])
                state = "applied" if all(edit.is_intact for edit in mine) else "overlaid"
            records.append(
                PatchRecord(
                    spec.name, spec.kind.value, spec.target, bindings, state,
                    spec.reason, spec.seam_tried, spec.remove_when, spec.requires,
                )
            )  # fmt: skip
        return records

    def digest(self) -> str:
        """Return a sha256 of the applied names and their targets' source, equal on equal ranks."""
        total = hashlib.sha256()
        for target in self._targets:
            function = symbols.function_of(target.raw)
            source = symbols.source_digest(function) or type(function).__qualname__
            total.update(f"{target.spec.name}={source}\n".encode())
        return total.hexdigest()

    def _overlays(self) -> list[Problem]:
        return [
            Problem(
                edit.spec.name,
                edit.place.label,
                "changed by a stranger after we patched it",
                "the object that megatron_dynmo put there",
                symbols.describe(edit.place.get()),
                "undo that change first, in the reverse order of patching",
            )
            for edit in self._edits
            if not edit.is_intact
        ]

    def _late_edits(self) -> list[_Edit]:
        known = {edit.place.key for edit in self._edits}
        late = []
        for module_name, place, value in symbols.scan(self._late):
            spec, old = self._late[id(value)]
            if place.key not in known and module_name != spec.factory_module:
                logger.debug("%s bound a patched symbol after apply; restored", place.label)
                late.append(_Edit(spec, place, old, value, was_own=True))
        return late


# id of an object of ours -> its patch and the original it stands for.
_LateTable = dict[int, tuple[PatchSpec, Any]]


def _build_edits(targets: list[Target]) -> list[_Edit]:
    """Call every factory and say what to change where; changes nothing itself."""
    edits: list[_Edit] = []
    problems: list[Problem] = []
    made: dict[int, str] = {}
    for target in targets:
        spec, function = target.spec, symbols.function_of(target.raw)
        try:
            new = spec.factory(None if spec.kind is Kind.ADD else function)
        except Exception as error:  # a factory can fail in any way at all
            problems.append(_factory_problem(spec, f"{type(error).__name__}: {error}"))
            continue
        if new is function:
            problems.append(_factory_problem(spec, "the original itself"))
            continue
        if type(new) is FunctionType:
            if id(new) in made:
                problems.append(_factory_problem(spec, f"the function of {made[id(new)]}"))
                continue
            made[id(new)] = spec.name
            _mark(new, function, spec)
        target.new = symbols.rewrap(target.raw, new)
        for place in target.places:
            old = place.get()
            value = target.new if old is target.raw else symbols.function_of(target.new)
            value = symbols.keep_unbound(place, old, value)
            edits.append(_Edit(spec, place, old, value, place.is_own))
    if problems:
        raise PatchError(render(problems))
    return edits


def _factory_problem(spec: PatchSpec, found: str) -> Problem:
    fix = "return a new object, made for this patch, at each call"
    return Problem(spec.name, spec.target, "factory failed", "a replacement", found, fix)


def _mark(new: FunctionType, original: Any, spec: PatchSpec) -> None:
    """Make a function of ours look like the original, and let it be recognised."""
    if inspect.isroutine(original) or hasattr(original, "__wrapped__"):
        functools.update_wrapper(new, original)
    setattr(new, MARKER, spec.name)


def _late_table(targets: list[Target], edits: list[_Edit]) -> _LateTable:
    """Say which of our objects, found in a module imported later, stand for which original.

    An object that somebody else held before, such as a class of another library, cannot be told
    from that other use and is left out.
    """
    table: _LateTable = {}
    ambiguous: set[int] = set()
    for target in targets:
        if target.spec.kind is Kind.ADD:
            continue
        pairs = {id(target.new): target.raw}
        pairs.setdefault(id(symbols.function_of(target.new)), symbols.function_of(target.raw))
        if symbols.is_traceable(target.new):
            ambiguous |= table.keys() & pairs.keys()
            table |= {key: (target.spec, old) for key, old in pairs.items()}
    ours = {edit.place.key for edit in edits}
    for module_name, place, value in symbols.scan(table):
        if place.key not in ours and module_name != table[id(value)][0].factory_module:
            ambiguous.add(id(value))
    return {key: entry for key, entry in table.items() if key not in ambiguous}


_active: PatchSet | None = None


def active() -> PatchSet | None:
    """Return the patch set in force in this process, if any."""
    return _active


def activate(patches: PatchSet) -> PatchSet:
    """Apply a patch set and make it the one in force.

    Returns:
        The set in force: `patches`, or the one active already if it has the same patches.

    Raises:
        PatchError: Another set is active, or `PatchSet.apply` failed.
    """
    global _active
    if _active is not None:
        now, wanted = ([(s.name, s.target) for s in p.specs] for p in (_active, patches))
        if now != wanted:
            raise PatchError(
                f"{len(now)} other patches are active already "
                f"({', '.join(name for name, _ in now)}); call deactivate() first"
            )
        return _active
    patches.apply()
    _active = patches
    return patches


def deactivate() -> None:
    """Undo the patch set in force; without one, do nothing.

    Raises:
        PatchConflict: Somebody patched on top; nothing is changed and the set stays active.
    """
    global _active
    if _active is not None:
        _active.revert()
        _active = None


@contextmanager
def patched(specs: Iterable[PatchSpec]) -> Iterator[PatchSet]:
    """Keep patches in force, as the active set, for the length of a block.

    Raises:
        PatchError: As `PatchSet.apply`.
        PatchConflict: As `PatchSet.revert`, at the end of the block.
    """
    global _active
    outer, patches = _active, PatchSet(specs)
    patches.apply()
    _active = patches
    try:
        yield patches
    finally:
        _active = outer
        patches.revert()
