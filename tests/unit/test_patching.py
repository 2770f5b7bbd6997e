"""The registry on a toy package: every binding shape in every order, all or nothing, exact undo."""

import importlib
import itertools
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import packaging
import pytest

from megatron_dynmo import patching
from megatron_dynmo.errors import PatchConflict, PatchError
from megatron_dynmo.patching import MARKER, Kind, PatchSet, patched, symbols
from tests.unit.toy_patches import SPECS, STEP, core, namespaces, spec, stranger_on_top, wrap

HERE = Path(__file__).parent
EVENTS = ("import", "patch", "patch", "undo")
ORDERS = sorted({" ".join(order) for order in itertools.permutations(EVENTS)})


# Orders


def test_all_orders_are_covered():
    assert len(ORDERS) == 4 * 3  # four places for the import, three for the undo among the rest
    for order in ORDERS:
        assert sorted(order.split()) == sorted(EVENTS)


@pytest.mark.parametrize("order", ORDERS)
def test_order(order):
    path = [HERE.parents[1], HERE, Path(packaging.__file__).parents[1]]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import toy_patches; toy_patches.drive({order!r})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"followed {order}\n", done.stderr


# Apply and undo


def test_every_shape_is_patched_and_restored(toy):
    before = namespaces()
    assert toy.observe() == toy.ORIGINAL
    with patched(SPECS) as patches:
        assert toy.observe() == toy.PATCHED
        assert {record.state for record in patches.status()} == {"applied"}
    assert toy.observe() == toy.ORIGINAL
    assert namespaces() == before
    assert {record.state for record in patches.status()} == {"not applied"}


def test_descriptors_survive(toy):
    with patched(SPECS):
        raw = vars(core().Engine)
        assert type(raw["scale"]) is staticmethod
        assert type(raw["label"]) is classmethod
        assert type(raw["size"]) is property and raw["size"].fset is not None


def test_wrapper_looks_like_the_original(toy):
    original = core().step
    with patched([STEP]):
        assert type(core().step) is FunctionType and core().step is not original
        assert core().step.__wrapped__ is original
        assert core().step.__name__ == "step" and core().step.__module__ == "toy_package.core"
        assert vars(core().step)[MARKER] == "step"
    assert MARKER not in vars(original)


def test_same_set_again_changes_nothing(toy):
    patches = PatchSet(SPECS)
    patches.apply()
    during = namespaces()
    patches.apply()
    assert namespaces() == during
    assert patches.check() == []
    patches.revert()
    patches.revert()
    assert toy.observe() == toy.ORIGINAL


def test_apply_imports_targets_but_not_bindings(toy_path):
    with patched([STEP]):
        assert core().step(4) == ("patched", 4)
        assert "toy_package.caller" not in sys.modules
        caller = importlib.import_module("toy_package.caller")
        assert caller.drive(4) == ("patched", 4)
    assert caller.advance is core().step


def test_bindings_of_a_users_script_are_rebound_and_logged(toy, caplog):
    with caplog.at_level(logging.INFO), patched([STEP]) as patches:
        assert toy.my_step(4) == ("patched", 4)
        places = {"toy_user:step", "toy_user:my_step", "toy_user:Trainer.hook"}
        assert set(patches.status()[0].bindings) == {*STEP.bindings, *places}
        assert all(place in caplog.text for place in places)
        assert "toy_package.caller" not in caplog.text  # that one was declared
        caplog.clear()
    assert caplog.text == ""  # nothing was bound late
    assert toy.my_step(4) == 4


def test_the_function_of_a_staticmethod_held_elsewhere(toy):
    original = toy.double
    with patched([spec("scale", "Engine.scale")]):
        assert toy.double is core().Engine.scale is not original
    assert toy.double is core().Engine.scale is original


def test_what_is_in_sys_modules_need_not_be_a_module(toy, monkeypatch):
    class Lazy:
        def __getattribute__(self, name):
            raise AssertionError("the scan woke a lazy module up")

    monkeypatch.setitem(sys.modules, "toy_lazy", Lazy())
    monkeypatch.setitem(sys.modules, "toy_absent", None)
    monkeypatch.setattr(toy, "lazy", Lazy(), raising=False)
    with patched(SPECS):
        assert toy.observe() == toy.PATCHED


def test_late_imports_are_restored(toy, tmp_path, monkeypatch):
    (tmp_path / "toy_late.py").write_text(
        "from toy_package.core import Clock as LateClock, Engine, backend, extra, step as late\n"
        "class Late:\n"
        "    run = Engine.run\n"
        "    scale = vars(Engine)['scale']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with patched(SPECS):
        late = importlib.import_module("toy_late")
        assert late.late(4) == ("patched", 4)
        assert late.LateClock().now() == 50
    assert late.extra() == "added"  # there is no original to give back
    assert late.late is core().step
    assert late.LateClock is core().Clock
    assert late.backend is core().backend
    assert late.Late.run is core().Engine.run
    assert vars(late.Late)["scale"] is vars(core().Engine)["scale"]


def test_an_object_that_others_hold_is_never_taken_for_ours(toy):
    existing = core().Engine
    with patched([spec("clock", "Clock", lambda _: existing, Kind.REPLACE,
                       bindings=("toy_package:Clock",))]):  # fmt: skip
        assert core().Clock is existing
    assert core().Engine is toy.Engine is existing
    assert core().Clock is not existing


def test_factory_module_may_hold_the_original(toy, monkeypatch):
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "held", core().step, raising=False)
    with patched([replace(STEP, factory=lambda original: wrap(original))]):
        assert here.held(4) == 4


def test_builtin_in_a_class_does_not_become_a_method(toy):
    core().Engine.count = core().total
    with patched([spec("total", "total", bindings=("toy_package.core:Engine.count",))]):
        assert core().Engine().count(3) == ("patched", 2)
    assert vars(core().Engine)["count"] is core().total


def test_inherited_attribute_is_patched_in_one_class_only(toy):
    with patched([spec("turbo", "Turbo.run")]):
        assert core().Turbo().run(4) == ("patched", 5)
        assert core().Engine().run(4) == 5
    assert "run" not in vars(core().Turbo)


@pytest.mark.parametrize("place", ["core", "caller", "user", "late class"])
def test_overlay_is_refused_and_nothing_changes(toy, place):
    patches = PatchSet(SPECS)
    patches.apply()
    owner, name = {
        "core": (core(), "step"),
        "caller": (sys.modules["toy_package.caller"], "advance"),
        "user": (toy, "my_step"),
        "late class": (core().Engine, "scale"),
    }[place]
    ours = vars(owner)[name]
    setattr(owner, name, stranger_on_top(ours))
    during = namespaces()
    with pytest.raises(PatchConflict, match=r"stranger_on_top\.<locals>\.intruder"):
        patches.revert()
    assert namespaces() == during
    assert len(patches.check()) == 1
    assert [record.state for record in patches.status()].count("overlaid") == 1
    setattr(owner, name, ours)
    patches.revert()
    assert toy.observe() == toy.ORIGINAL


def test_removed_attribute_is_a_conflict(toy):
    patches = PatchSet([spec("turbo", "Turbo.run")])
    patches.apply()
    ours = vars(core().Turbo)["run"]
    del core().Turbo.run
    with pytest.raises(PatchConflict, match=r"Turbo\.run"):
        patches.revert()
    core().Turbo.run = ours
    patches.revert()


# All or nothing


def test_factory_failures_change_nothing(toy):
    def broken(original):
        raise KeyError("flag")

    shared = wrap(core().step)
    before = namespaces()
    with pytest.raises(PatchError) as error:
        PatchSet(
            [
                STEP,
                spec("broken", "Engine.scale", broken),
                spec("same", "Engine.label", lambda original: original),
                spec("one", "Engine.measure", lambda _: shared),
                spec("two", "Turbo.run", lambda _: shared),
            ]
        ).apply()
    assert namespaces() == before
    for part in ("KeyError: 'flag'", "the original itself", "the function of one"):
        assert part in str(error.value)


def test_attribute_that_cannot_be_set_rolls_back(toy):
    before = namespaces()
    sealed = replace(spec("sealed", "x"), target="builtins:int.bit_length", scan=("toy_package",))
    patches = PatchSet([*SPECS, sealed])
    with pytest.raises(PatchError, match=r"int\.bit_length cannot be set, nothing was changed"):
        patches.apply()
    assert namespaces() == before
    assert toy.observe() == toy.ORIGINAL
    assert not patches.is_applied


# State, lists and digests


def test_active_set(toy):
    patches = PatchSet(SPECS)
    assert patching.active() is None and patches.controller is None
    assert patching.activate(patches) is patches is patching.active()
    assert patching.activate(PatchSet(SPECS)) is patches
    with pytest.raises(PatchError, match="active already"):
        patching.activate(PatchSet([STEP]))
    patching.deactivate()
    patching.deactivate()
    assert patching.active() is None
    assert toy.observe() == toy.ORIGINAL


def test_conflict_leaves_the_set_active(toy):
    patches = patching.activate(PatchSet([STEP]))
    ours, core().step = core().step, None
    with pytest.raises(PatchConflict):
        patching.deactivate()
    assert patching.active() is patches
    core().step = ours
    patching.deactivate()


def test_patched_restores_after_an_error_and_nests(toy):
    with pytest.raises(ZeroDivisionError), patched([STEP]) as outer:
        with patched([spec("scale", "Engine.scale")]) as inner:
            assert patching.active() is inner
        assert patching.active() is outer
        _ = 1 / 0
    assert toy.observe() == toy.ORIGINAL


def test_digest_tells_different_sets_and_sources_apart(toy):
    patches = PatchSet([STEP])
    unpatched = patches.digest()
    seen = [unpatched]
    for specs in ([STEP], SPECS, [replace(STEP, name="renamed")]):
        with patched(specs) as patches:
            seen.append(patches.digest())
    assert len(set(seen)) == 4
    with patched([STEP]) as patches:
        assert patches.digest() == seen[1]
    core().step.__code__ = core().other.__code__
    with patched([replace(STEP, params=None)]) as patches:
        assert patches.digest() not in seen


def test_one_pass_over_the_modules_for_all_patches(toy, monkeypatch):
    passes = []
    scan = symbols.scan
    monkeypatch.setattr(symbols, "scan", lambda wanted: passes.append(1) or scan(wanted))
    patches = PatchSet(SPECS)
    patches.check()
    assert len(passes) == 1
    patches.apply()
    assert len(passes) == 3  # the originals before, our own objects after
    patches.revert()
    assert len(passes) == 4


def test_the_registry_needs_neither_torch_nor_megatron():
    code = (
        "import sys, megatron_dynmo.patching as p;"
        "print(sorted({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
