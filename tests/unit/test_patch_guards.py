"""The guards: whatever in upstream is not as a patch expects gives one clear error."""

import functools
from dataclasses import replace

import packaging
import pytest

from megatron_dynmo.errors import PatchError
from megatron_dynmo.patching import Kind, PatchSet, patched, symbols
from tests.unit.toy_patches import STEP, core, namespaces, spec, stranger_on_top


def refusal(*specs):
    """Apply, expect one error and nothing changed, and return its text."""
    before = namespaces()
    patches = PatchSet(specs)
    with pytest.raises(PatchError) as error:
        patches.apply()
    assert namespaces() == before
    assert not patches.is_applied
    assert len(patches.check()) > 0
    return str(error.value)


def test_renamed_parameter(toy):
    text = refusal(replace(STEP, params=("step_number", "scale")))
    assert "parameters differ: step (toy_package.core:step)" in text
    assert "(step_number, scale)" in text and "(iteration, scale)" in text


def test_params_of_a_builtin(toy):
    class NoSignature:
        __signature__ = "none"

        def __call__(self):
            pass

    core().opaque = NoSignature()
    assert "set params=None" in refusal(spec("opaque", "opaque", params=("value",)))


def test_missing_symbol_and_module(toy):
    text = refusal(
        spec("gone", "gone"),
        spec("gone-class", "Gone.run"),
        replace(spec("gone-module", "x"), target="toy_package.gone:x"),
        spec("nested", "LIMIT.real.nothing"),
    )
    for name in ("gone ", "gone-class ", "gone-module ", "nested "):
        assert name in text
    assert text.count("missing target") == 4
    assert "toy_package.core has no Gone" in text
    assert "No module named 'toy_package.gone'" in text


def test_module_that_fails_to_import(toy, tmp_path, monkeypatch):
    (tmp_path / "toy_late.py").write_text("raise RuntimeError('no CUDA here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "no CUDA here" in refusal(replace(STEP, target="toy_late:step"))


def test_unsupported_and_absent_distribution(toy):
    text = refusal(
        replace(STEP, requires="packaging<2"),
        spec("total", "total", requires="no-such-distribution>=1"),
    )
    assert "expected: packaging<2" in text
    assert "found:    no no-such-distribution" in text


@pytest.mark.parametrize("version", ["0.19.2+a1b2c3d", "0.19.0", "0.19.9", "0.19.3rc1"])
def test_version_is_compared_by_range(toy, monkeypatch, version):
    monkeypatch.setattr(symbols, "installed_version", lambda _: version)
    assert PatchSet([replace(STEP, requires="megatron-core>=0.19,<0.20")]).check() == []


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0", "0.20.0+a1b2c3d", None])
def test_version_outside_the_range(toy, monkeypatch, version):
    monkeypatch.setattr(symbols, "installed_version", lambda _: version)
    text = refusal(replace(STEP, requires="megatron-core>=0.19,<0.20"))
    assert "unsupported version" in text and (version or "no megatron-core") in text


def test_undeclared_binding(toy):
    text = refusal(replace(STEP, bindings=()))
    assert "undeclared binding" in text
    assert "toy_package:step" in text and "toy_package.caller:advance" in text
    assert "undeclared binding" in refusal(spec("run", "Engine.run"))  # Engine.__call__ is it too


def test_scanned_packages_are_not_prefixes(toy):
    with patched([replace(STEP, bindings=(), scan=("toy",))]):
        assert toy.observe()["renamed"] == ("patched", 4)
    with pytest.raises(PatchError, match="toy_user:my_step"):
        PatchSet([replace(STEP, scan=("toy_user",))]).apply()


def test_declared_binding_that_is_gone(toy):
    stale = (*STEP.bindings, "toy_package.core:advance", "toy_package.core:Gone.step")
    assert refusal(replace(STEP, bindings=stale)).count("missing binding") == 2


def test_replace_needs_the_digest_of_this_version(toy, monkeypatch):
    monkeypatch.setattr(symbols, "installed_version", lambda _: "20.1+local")
    right = symbols.source_digest(core().step)
    takeover = replace(STEP, kind=Kind.REPLACE, factory=lambda _: lambda iteration: 0)
    assert "unknown digest" in refusal(takeover)
    text = refusal(replace(takeover, digests={"20.0": right}))
    assert "known: 20.0" in text and f'digests["20.1"] = "{right}"' in text
    assert "digest differs" in refusal(replace(takeover, digests={"20.1": "0" * 64}))
    with patched([replace(takeover, digests={"20.1": right})]):
        assert core().step(4) == 0


def test_digest_of_a_wrap_is_advice(toy, caplog):
    version = packaging.__version__
    with patched([STEP]):
        assert "source of" not in caplog.text
    with patched([replace(STEP, digests={version: "0" * 64})]):
        assert core().step(4) == ("patched", 4)
    assert "source of toy_package.core:step changed" in caplog.text


def test_add_needs_a_free_name(toy):
    text = refusal(spec("other", "other", lambda _: None, Kind.ADD))
    assert "already there" in text and "toy_package.core.other" in text


def test_all_problems_in_one_error(toy):
    text = refusal(
        replace(STEP, params=("a",), bindings=(), kind=Kind.REPLACE, requires="packaging>=20"),
        spec("gone", "gone", requires="packaging<2"),
        spec("total", "total", requires="packaging<2"),
        spec("scale", "Engine.scale"),
    )
    assert text.startswith("6 problems; nothing was changed")
    assert (
        "unsupported version: gone (toy_package.core:gone), total (toy_package.core:total)" in text
    )
    for kind in ("parameters differ", "unknown digest", "undeclared binding", "missing target"):
        assert text.count(kind) == 1
    assert "Engine.scale" not in text


def test_two_patches_of_one_object(toy):
    alias = replace(
        STEP, name="alias", target="toy_package:step", bindings=("toy_package.core:step",)
    )
    assert "claimed twice" in refusal(STEP, alias)


@pytest.mark.parametrize("fields", [{"name": "again"}, {"target": "toy_package.core:again"}])
def test_duplicates_raise(fields):
    with pytest.raises(PatchError, match=r"more than one patch has the (name step|target toy)"):
        PatchSet([STEP, replace(STEP, **fields)])


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "Not Kebab"},
        {"target": "toy_package.core.step"},
        {"bindings": ("toy_package",)},
        {"seam_tried": " "},
        {"requires": "packaging=>1"},
        {"kind": Kind.ADD},
    ],
)
def test_malformed_spec(fields):
    with pytest.raises(PatchError):
        replace(STEP, **fields)


def test_stranger_before_us(toy):
    ours = core().step
    core().step = stranger_on_top(ours)
    text = refusal(replace(STEP, bindings=(), scan=("nothing",)))
    assert "changed by a stranger" in text and "stranger_on_top.<locals>.intruder" in text
    text = refusal(STEP)  # the other bindings no longer hold the same object
    assert text.count("changed by a stranger") == 3


def test_our_own_patch_of_another_set(toy):
    with patched([STEP]):
        other = PatchSet([replace(STEP, name="other")])
        with pytest.raises(PatchError, match="patch step of megatron_dynmo"):
            other.apply()


def layer_of(home, wrapped):
    """A wrapper as the module `home` would make it."""
    names = {"__name__": home, "functools": functools, "wrapped": wrapped}
    exec("@functools.wraps(wrapped)\ndef layer(*args): return wrapped(*args)", names)
    return names["layer"]


def plain(value):
    return value


@pytest.mark.parametrize("home", ["tests.other", "torch.utils._contextlib", "contextlib"])
def test_decorators_of_upstream_are_no_strangers(home):
    decorated = functools.lru_cache(layer_of(home, plain))
    assert symbols.foreign_layer(decorated, "tests") is symbols.MISSING


@pytest.mark.parametrize("home", ["somebody.patches", "__main__"])
def test_a_layer_from_elsewhere_is_a_stranger(home):
    layer = layer_of(home, plain)
    assert symbols.foreign_layer(layer, "tests") is layer
    assert symbols.foreign_layer(layer_of("tests.other", layer), "tests") is layer


def test_decorated_by_the_standard_library(toy):
    with patched([spec("section", "section", params=("name",))]):
        assert core().section("x")[0] == "patched"
