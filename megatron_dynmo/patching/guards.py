"""Compare upstream with what the patches expect, and find every place to patch.

Tier: pure (standard library and packaging). Changes nothing; importing the targets' modules is its
only effect. Every guard returns the problems it finds, so that all of them are reported at once.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from megatron_dynmo.errors import PatchError
from megatron_dynmo.patching import symbols
from megatron_dynmo.patching.spec import Kind, PatchSpec, Problem
from megatron_dynmo.patching.symbols import MISSING, Binding

logger = logging.getLogger(__name__)

MARKER = "__dynmo_patch__"
"""Attribute of every function of ours that stands in for another; holds the patch's name."""

Versions = Callable[[str], str | None]
"""Distribution name to installed version."""


@dataclass(eq=False)
class Target:
    """A spec whose target was found.

    Attributes:
        raw: The original as its namespace holds it; `MISSING` for an ADD.
        places: Every place that holds the original, the target's own first.
        new: The replacement for `raw`, once it is built.
    """

    spec: PatchSpec
    raw: Any
    places: list[Binding]
    new: Any = field(default=MISSING)


def find_targets(specs: Iterable[PatchSpec]) -> tuple[list[Target], list[Problem]]:
    """Find every target and all places that hold it, and everything that is not as expected.

    The order of the guards is version, existence, parameters, digest, strangers, bindings.
    """
    versions = cache(symbols.installed_version)
    targets: list[Target] = []
    problems: list[Problem] = []
    for spec in specs:
        place, raw, found = None, MISSING, "nothing of this name"
        try:
            place = symbols.resolve(spec.target)
            raw = place.get()
        except symbols.SymbolNotFound as error:
            found = str(error)
        if place is None or (raw is MISSING) != (spec.kind is Kind.ADD):
            found = found if raw is MISSING else symbols.describe(raw)
            problems += [*_guard_version(spec, versions), _existence_problem(spec, found)]
            continue
        target = Target(spec, raw, [place])
        problems += guard(spec, raw, versions)
        problems += _add_declared(target)
        targets.append(target)
    problems += _add_undeclared(targets)
    return targets, problems + _claimed_twice(targets)


def guard(spec: PatchSpec, raw: Any, versions: Versions) -> list[Problem]:
    """Compare the version and the object found with what the spec expects."""
    problems = _guard_version(spec, versions)
    if spec.kind is not Kind.ADD:
        problems += _guard_params(spec, raw)
        problems += _guard_digest(spec, raw, versions)
        problems += _guard_stranger(spec, raw)
    return problems


def digest_key(spec: PatchSpec, versions: Versions = symbols.installed_version) -> str | None:
    """Return the version under which `PatchSpec.digests` lists what is installed, else None.

    The local part is dropped: it names the build, or the commit of an enclosing checkout.
    """
    version = versions(Requirement(spec.requires).name)
    return Version(version).public if version else None


def target_digest(spec: PatchSpec) -> tuple[str, str] | None:
    """Return what to write into `PatchSpec.digests` for the version installed.

    Returns:
        Version and sha256 of the target's source, or None if it has no source of its own: an
        ADD, a C builtin, a value.

    Raises:
        PatchError: The target or the distribution is not there.
    """
    if spec.kind is Kind.ADD:
        return None
    key = digest_key(spec)
    try:
        raw = symbols.resolve(spec.target).get()
    except symbols.SymbolNotFound as error:
        raise PatchError(f"patch {spec.name}: {error}") from error
    if raw is MISSING or key is None:
        raise PatchError(f"patch {spec.name}: no {spec.target if key else spec.requires} here")
    digest = symbols.source_digest(symbols.function_of(raw))
    return (key, digest) if digest else None


def _existence_problem(spec: PatchSpec, found: str) -> Problem:
    if spec.kind is Kind.ADD:
        fix = "upstream has it now: use it and drop the patch, or choose another name"
        return Problem(spec.name, spec.target, "already there", "no such attribute", found, fix)
    fix = "find where upstream moved it, or drop the patch"
    return Problem(spec.name, spec.target, "missing target", "an object to patch", found, fix)


def _guard_version(spec: PatchSpec, versions: Versions) -> list[Problem]:
    requirement = Requirement(spec.requires)
    version = versions(requirement.name)
    if version and requirement.specifier.contains(version, prereleases=True):
        return []
    found = f"{requirement.name} {version}" if version else f"no {requirement.name}"
    fix = f"install '{spec.requires}'"
    return [Problem(spec.name, spec.target, "unsupported version", spec.requires, found, fix)]


def _guard_params(spec: PatchSpec, raw: Any) -> list[Problem]:
    if spec.params is None:
        return []
    names = symbols.parameter_names(symbols.function_of(raw))
    if names == spec.params:
        return []
    found = "no signature" if names is None else f"({', '.join(names)})"
    fix = "read the new signature, adapt the wrapper, then update params"
    if names is None:
        fix = "set params=None if this is not a Python function"
    expected = f"({', '.join(spec.params)})"
    return [Problem(spec.name, spec.target, "parameters differ", expected, found, fix)]


def _guard_digest(spec: PatchSpec, raw: Any, versions: Versions) -> list[Problem]:
    key = digest_key(spec, versions)
    function = inspect.unwrap(symbols.function_of(raw))
    if key is None or type(function) is not FunctionType:
        return []  # a missing distribution is reported once, as a version problem
    expected, found = spec.digests.get(key), symbols.source_digest(function) or "no source"
    if expected == found:
        return []
    if spec.kind is Kind.WRAP:
        if expected is not None:
            logger.warning("%s: source of %s changed within %s", spec.name, spec.target, key)
        return []
    kind = "unknown digest" if expected is None else "digest differs"
    fix = f'read the source again, adapt the replacement, then add digests["{key}"] = "{found}"'
    expected = expected or f"a digest for {key}; known: {', '.join(spec.digests) or 'none'}"
    return [Problem(spec.name, spec.target, kind, expected, found, fix)]


def _guard_stranger(spec: PatchSpec, raw: Any) -> list[Problem]:
    function = symbols.function_of(raw)
    package = spec.target.partition(":")[0].partition(".")[0]
    stranger = symbols.foreign_layer(function, package)
    if MARKER in getattr(function, "__dict__", {}):
        found = f"patch {getattr(function, MARKER)} of megatron_dynmo"
    elif stranger is not MISSING:
        found = symbols.describe(stranger)
    else:
        return []
    fix = "apply our patches before the other one, or remove it"
    expected = f"an object of {package}"
    return [Problem(spec.name, spec.target, "changed by a stranger", expected, found, fix)]


def _add_declared(target: Target) -> list[Problem]:
    """Add the declared places whose modules are imported; any other will bind ours later."""
    spec, problems = target.spec, []
    originals = {id(target.raw), id(symbols.function_of(target.raw))}
    for address in spec.bindings:
        if not symbols.is_imported(address):
            continue
        value: Any = MISSING
        try:
            place = symbols.resolve(address)
            value = place.get()
        except symbols.SymbolNotFound:
            pass
        if id(value) in originals:
            target.places.append(place)
            continue
        kind = "missing binding" if value is MISSING else "changed by a stranger"
        expected, found = f"the same object as {spec.target}", symbols.describe(value)
        fix = f'drop "{address}" from bindings if upstream did, or remove the other patch'
        problems.append(Problem(spec.name, address, kind, expected, found, fix))
    return problems


def _add_undeclared(targets: list[Target]) -> list[Problem]:
    """Find every other place in one pass: an error in scanned packages, rebound elsewhere."""
    holders: dict[int, list[Target]] = defaultdict(list)
    for target in targets:
        # What a class inherits is shared by construction; only this class is patched.
        if target.places[0].is_own and symbols.is_traceable(target.raw):
            for key in {id(target.raw), id(symbols.function_of(target.raw))}:
                holders[key].append(target)
    known = {id(target): {place.key for place in target.places} for target in targets}
    undeclared: dict[str, list[str]] = defaultdict(list)
    for module_name, place, value in symbols.scan(holders):
        for target in holders[id(value)]:
            if place.key in known[id(target)] or module_name == target.spec.factory_module:
                continue
            if any(f"{module_name}.".startswith(f"{name}.") for name in target.spec.scan):
                undeclared[target.spec.name].append(place.label)
            else:
                target.places.append(place)
    return [
        Problem(
            target.spec.name,
            target.spec.target,
            "undeclared binding",
            f"no other holder in {', '.join(target.spec.scan)} than {target.spec.bindings}",
            ", ".join(labels),
            "read what these callers do, then add them to bindings",
        )
        for target in targets
        if (labels := undeclared[target.spec.name])
    ]


def _claimed_twice(targets: list[Target]) -> list[Problem]:
    owners: dict[tuple[int, str], PatchSpec] = {}
    problems = []
    for target in targets:
        for place in target.places:
            first = owners.setdefault(place.key, target.spec)
            if first is not target.spec:
                found = f"patch {first.name} changes it too"
                fix = "these targets are one object: keep one patch and declare the other binding"
                problems.append(
                    Problem(target.spec.name, place.label, "claimed twice", "one patch", found, fix)
                )
    return problems
