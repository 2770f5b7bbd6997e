"""Find Python objects by address and find every place that holds them.

Tier: pure (standard library only). An address is ``"module:qualname"``. This file reads and writes
single attributes; what is patched, why and under which guards is the business of `patching`.
"""

import hashlib
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()

# Modules that tell the version of a source checkout which was never installed.
_VERSION_ATTRIBUTES = {"megatron-core": ("megatron.core.package_info", "__version__")}

# Objects of these types are shared by unrelated names, so identity says nothing about them.
_ANONYMOUS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range)


class SymbolNotFound(LookupError):
    """No object at this address; the text says which part of the address failed."""


@dataclass(frozen=True, eq=False)
class Binding:
    """One attribute of one module, class or instance.

    Attributes:
        owner: The object whose namespace holds the attribute; kept alive by this value.
        attribute: Name in that namespace.
        label: The address, for messages.
    """

    owner: Any
    attribute: str
    label: str

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the place, the same however its module is called."""
        return id(self.owner), self.attribute

    @property
    def is_own(self) -> bool:
        """Whether the owner itself holds the attribute, rather than a base class."""
        return self.attribute in vars(self.owner)

    def get(self) -> Any:
        """Return the raw attribute, or `MISSING`.

        A class is read through the namespaces of its MRO, because ordinary attribute access would
        turn a staticmethod, classmethod or property into something else.
        """
        if issubclass(type(self.owner), type):
            for cls in self.owner.__mro__:
                if self.attribute in vars(cls):
                    return vars(cls)[self.attribute]
            return MISSING
        if self.is_own:
            return vars(self.owner)[self.attribute]
        # A module may produce attributes on demand (PEP 562).
        return getattr(self.owner, self.attribute, MISSING)

    def set(self, value: Any) -> None:
        """Make the owner hold `value`."""
        setattr(self.owner, self.attribute, value)

    def delete(self) -> None:
        """Remove the attribute from the owner itself."""
        delattr(self.owner, self.attribute)


def resolve(address: str) -> Binding:
    """Return the place that `address` names, importing its module when needed.

    The attribute itself need not exist; everything before it must.

    Raises:
        SymbolNotFound: The module cannot be imported or a class on the way is missing.
    """
    module_name, _, qualname = address.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except Exception as error:  # an import can fail in any way at all
        raise SymbolNotFound(
            f"importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    *path, attribute = qualname.split(".")
    for part in path:
        try:
            owner = getattr(owner, part)
        except AttributeError as error:
            raise SymbolNotFound(f"{module_name} has no {part}") from error
    if not hasattr(owner, "__dict__"):
        raise SymbolNotFound(f"{'.'.join(path)} is a {type(owner).__name__} without a namespace")
    return Binding(owner, attribute, address)


def is_imported(address: str) -> bool:
    """Whether the module of `address` has been imported."""
    return address.partition(":")[0] in sys.modules


def scan(wanted: Iterable[int]) -> Iterator[tuple[str, Binding, Any]]:
    """Yield every place in `sys.modules` that holds one of the wanted objects, in one pass.

    Looks at module globals and at the namespaces of classes defined in them. Closures, default
    arguments, partials and containers cannot be seen.

    Args:
        wanted: ``id()`` of the objects; the caller keeps them alive.

    Yields:
        Module name, place, and the raw value found there.
    """
    search = _Search(frozenset(wanted), set(), _IsClass())
    for module_name, module in list(sys.modules.items()):
        # type(), not isinstance(): the latter asks `__class__`, which wakes lazy proxies up.
        if issubclass(type(module), ModuleType) and id(module) not in search.seen:
            search.seen.add(id(module))
            yield from _scan_namespace(module, module_name, "", search)


class _IsClass(dict[type, bool]):
    """Whether things of a type are classes; asked for the same few types a million times."""

    def __missing__(self, kind: type) -> bool:
        answer = self[kind] = issubclass(kind, type)
        return answer


class _Search(NamedTuple):
    wanted: frozenset[int]
    seen: set[int]
    is_class: _IsClass


def _scan_namespace(
    owner: Any, module_name: str, prefix: str, search: _Search
) -> Iterator[tuple[str, Binding, Any]]:
    wanted, seen, is_class = search
    namespace = dict(vars(owner))
    # Nearly always the answer is no, and this says so without a step in Python.
    if not wanted.isdisjoint(map(id, namespace.values())):
        for attribute, value in namespace.items():
            if id(value) in wanted:
                place = Binding(owner, attribute, f"{module_name}:{prefix}{attribute}")
                yield module_name, place, value
    classes = [pair for pair in namespace.items() if is_class[type(pair[1])]]
    for attribute, value in classes:
        if id(value) not in seen and vars(value).get("__module__") == module_name:
            seen.add(id(value))
            yield from _scan_namespace(value, module_name, f"{prefix}{attribute}.", search)


def is_traceable(value: Any) -> bool:
    """Whether finding the same object elsewhere means that it is the same symbol."""
    return value is not MISSING and not isinstance(value, _ANONYMOUS)


def function_of(raw: Any) -> Any:
    """Return the function inside a staticmethod, classmethod or property; else `raw` itself."""
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def rewrap(raw: Any, function: Any) -> Any:
    """Put `function` into the kind of descriptor that `raw` is; setter and deleter are kept."""
    if isinstance(function, staticmethod | classmethod | property):
        return function
    if isinstance(raw, property):
        return raw.getter(function)
    return type(raw)(function) if isinstance(raw, staticmethod | classmethod) else function


def keep_unbound(place: Binding, old: Any, new: Any) -> Any:
    """Keep a class attribute from turning into a method: a C builtin gets no self, ours would."""
    in_class = issubclass(type(place.owner), type)
    if in_class and type(new) is FunctionType and not hasattr(type(old), "__get__"):
        return staticmethod(new)
    return new


def parameter_names(function: Any) -> tuple[str, ...] | None:
    """Return the parameter names in order, without stars; None if there is no signature."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def source_digest(value: Any) -> str | None:
    """Return the sha256 of an object's source, below any wrappers; None if it has no source."""
    try:
        source = inspect.getsource(value)  # looks below the wrappers by itself
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.rstrip().encode()).hexdigest()


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution or importable checkout, else None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        module_name, attribute = _VERSION_ATTRIBUTES.get(distribution, ("", ""))
    try:
        return str(getattr(importlib.import_module(module_name), attribute))
    except (ImportError, AttributeError, ValueError):
        return None


def foreign_layer(function: Any, package: str) -> Any:
    """Return the outermost layer of a wrapped function that `package` did not put there.

    Upstream's own decorators come from the package itself, the standard library or torch; any
    other home means that somebody patched the function at run time. Returns `MISSING` if none.
    """
    trusted = {package, "torch", *sys.stdlib_module_names}
    layer = function
    while layer is not MISSING and (type(layer) is FunctionType or hasattr(layer, "__wrapped__")):
        if _home(layer).partition(".")[0] not in trusted:
            return layer
        layer = getattr(layer, "__wrapped__", MISSING)
    return MISSING


def _home(layer: Any) -> str:
    # functools.wraps copies __module__, so only the globals tell where a function was written.
    if type(layer) is FunctionType:
        return str(layer.__globals__.get("__name__", ""))
    return type(layer).__module__


def describe(value: Any) -> str:
    """Name an object for a person: a function by where its code really is."""
    if value is MISSING:
        return "nothing"
    function = function_of(value)
    if type(function) is FunctionType:
        code = function.__code__
        return f"{_home(function)}.{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    kind = type(function).__name__
    return f"{kind} {name}" if name else f"{kind} {function!r:.80}"
