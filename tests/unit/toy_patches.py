"""Patches of every kind for the toy package, and a driver that applies and undoes them in an order.

Run as ``python -S -c "import toy_patches; toy_patches.drive('import patch undo patch')"``.
"""

import functools
import sys
import types

from megatron_dynmo.patching import Kind, PatchSet, PatchSpec, activate, deactivate


def wrap(original):
    def replacement(*args, **kwargs):
        return ("patched", original(*args, **kwargs))

    return replacement


class FastClock:
    """Replaces a class; being held by the factory's module, it still counts as ours."""

    def now(self):
        return 50


def added_function(_):
    return lambda: "added"


def added_method(_):
    return lambda self: ("added", self._size)


def fast_backend(_):
    module = types.ModuleType("fast")
    module.SPEED = 2
    return module


CORE = "toy_package.core"


def spec(name, target, factory=wrap, kind=Kind.WRAP, **fields):
    fields = {
        "reason": "the test needs it",
        "seam_tried": "none in a toy",
        "remove_when": "never",
        "requires": "packaging>=20",
        "scan": ("toy_package",),
        **fields,
    }
    return PatchSpec(name, f"{CORE}:{target}", kind, factory, **fields)


STEP = spec(
    "step",
    "step",
    params=("iteration", "scale"),
    bindings=("toy_package:step", "toy_package.caller:advance"),
)
SPECS = (
    STEP,
    spec("run", "Engine.run", params=("self", "count"), bindings=(f"{CORE}:Engine.__call__",)),
    spec("scale", "Engine.scale", params=("value",)),
    spec("label", "Engine.label", params=("cls", "suffix")),
    spec("size", "Engine.size", params=("self",)),
    spec("measure", "Engine.measure", params=("self", "count")),
    spec("depth", "Engine.Inner.depth", params=("self",)),
    spec("turbo", "Turbo.run", params=("self", "count")),
    spec("total", "total"),
    spec("limit", "LIMIT", lambda old: old * 10, Kind.REPLACE),
    spec("backend", "backend", fast_backend, Kind.REPLACE, bindings=("toy_package:slow",)),
    spec("clock", "Clock", lambda _: FastClock, Kind.REPLACE, bindings=("toy_package:Clock",)),
    spec("extra", "extra", added_function, Kind.ADD),
    spec("extra-method", "Engine.extra", added_method, Kind.ADD),
)  # fmt: skip


def stranger_on_top(original):
    """Patch as somebody would who knows nothing of us."""

    @functools.wraps(original)
    def intruder(*args, **kwargs):
        return ("stranger", original(*args, **kwargs))

    return intruder


def core():
    return sys.modules["toy_package.core"]


def toy_modules():
    names = ("toy_package", "toy_user", "toy_late")
    return {n: m for n, m in sys.modules.items() if n.partition(".")[0] in names}


def forget_toys():
    for name in toy_modules():
        del sys.modules[name]


def namespaces():
    """Every name in every toy module and class, by identity."""
    owners = [*toy_modules().values(), sys.modules["toy_user"].Trainer]
    owners += [core().Engine, core().Engine.Inner, core().Turbo, core().Clock]
    return {
        (repr(owner), name): id(value)
        for owner in owners
        for name, value in vars(owner).items()
        if name not in ("__builtins__", "__dict__", "__weakref__")
    }


def drive(order):
    """Follow an order of "import", "patch" and "undo", looking at every symbol after each step."""
    is_imported = is_patched = False
    for event in order.split():
        if event == "import":
            import toy_user  # noqa: F401

            is_imported = True
        elif event == "patch":
            activate(PatchSet(SPECS))
            is_patched = True
        else:
            deactivate()
            is_patched = False
        if is_imported:
            user = sys.modules["toy_user"]
            expected = user.PATCHED if is_patched else user.ORIGINAL
            found = user.observe()
            assert found == expected, (event, {k: v for k, v in found.items() if v != expected[k]})
            core = sys.modules["toy_package.core"]
            assert user.step is user.my_step is core.step is sys.modules["toy_package"].step
    print("followed", order)
