"""Every patch fits the installed Megatron, is undone exactly, and refuses what it does not know.

Each test runs in a process of its own, forked after Megatron's training entry points are imported.
"""

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable

import pytest

import megatron_dynmo
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import PatchConflict, PatchError
from tests.ranks import run_ranks

# What Megatron's training scripts import: from here on, every binding that will be is there.
ENTRY_POINTS = (
    "megatron.training",
    "megatron.training.training",
    "megatron.training.initialize",
    "megatron.training.arguments",
    "megatron.training.argument_utils",
    "megatron.training.checkpointing",
    "megatron.training.async_utils",
    "megatron.training.models.gpt",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.layer_wise_optimizer",
    "megatron.core.transformer.multi_token_prediction",
    "megatron_dynmo.adapters.gpt_step",
    "megatron_dynmo.adapters.gpt_data",
    "megatron_dynmo.adapters.gpt_stages",
)


def in_a_process(fn: Callable[..., object], *args: object) -> object:
    """Run `fn` in a fresh process with Megatron's entry points imported."""
    return run_ranks(_with_entry_points, 1, fn, args, init_process_group=False)[0]


def _with_entry_points(
    rank: int, world_size: int, fn: Callable[..., object], args: tuple
) -> object:
    for name in ENTRY_POINTS:
        importlib.import_module(name)
    return fn(*args)


def _specs():
    from megatron_dynmo.patches import all_specs

    return all_specs()


def _value(address: str) -> object:
    from megatron_dynmo.patching import symbols

    return symbols.resolve(address).get()


def _check_each() -> dict[str, dict[str, object]]:
    from megatron_dynmo.patching import PatchSet, guards

    found = {}
    for spec in _specs():
        targets, problems = guards.find_targets([spec])
        places = sorted(place.label for target in targets for place in target.places)
        found[spec.name] = {
            "problems": [str(problem) for problem in problems],
            "declared": sorted(spec.addresses),
            "megatron": [p for p in places if p.startswith(("megatron.", "torch"))],
            "wants": spec.requires,
        }
    together = PatchSet(_specs()).check()
    found["all together"] = {"problems": [str(problem) for problem in together]}
    return found


def test_every_spec_fits_and_declares_exactly_the_bindings_that_there_are():
    found = in_a_process(_check_each)
    assert found.pop("all together") == {"problems": []}
    assert len(found) > 20
    for name, row in found.items():
        assert row["problems"] == [], name
        if row["declared"][0].startswith("megatron."):
            assert row["megatron"] == row["declared"], name
            assert row["wants"] == "megatron-core>=0.19,<0.20", name


def _apply_and_revert(mode: str) -> dict[str, object]:
    """Enable as a user does, look at every place, and disable."""
    from megatron_dynmo.patches import specs_for
    from megatron_dynmo.patching import MARKER

    specs = specs_for(DynMoConfig(mode=mode), on_cpu=True)
    addresses = [address for spec in specs for address in spec.addresses]
    before = {address: _value(address) for address in addresses}
    megatron_dynmo.enable(DynMoConfig(mode=mode, device="cpu"))
    megatron_dynmo.enable(DynMoConfig(mode=mode, device="cpu"))  # again is a no-op
    status = megatron_dynmo.patch_status()
    answers = {
        "unchanged": [a for a in addresses if _value(a) is before[a]],
        "states": sorted({record.state for record in status}),
        "names": [record.name for record in status],
        "signatures": [p for spec in specs if spec.params for p in _signature_problems(spec)],
    }
    megatron_dynmo.disable()
    answers["not restored"] = [a for a in addresses if _value(a) is not before[a]]
    answers["status"] = megatron_dynmo.patch_status()
    answers["left over"] = [
        f"{module}.{name}"
        for module, content in list(sys.modules.items())
        if module.startswith("megatron.")
        for name, value in list(vars(content).items())
        if isinstance(value, types.FunctionType) and MARKER in vars(value)
    ]
    return answers


def _signature_problems(spec) -> list[str]:
    """Ways to call upstream's function that the wrapper does not take."""
    from megatron_dynmo.patching import symbols

    wrapper = symbols.function_of(_value(spec.target))
    seen = tuple(inspect.signature(wrapper).parameters)
    problems = [] if seen == spec.params else [f"{spec.name}: shows {seen}"]
    own = inspect.signature(wrapper, follow_wrapped=False)
    upstream = inspect.signature(wrapper).parameters.values()
    plain = [p for p in upstream if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only = {p.name: None for p in upstream if p.kind is p.KEYWORD_ONLY}
    in_order = [p.name for p in plain]
    by_name = {p.name: None for p in plain if p.name not in ("self", "cls")}
    bound = [n for n in in_order if n in ("self", "cls")]
    for args, kwargs in ((in_order, keyword_only), (bound, {**by_name, **keyword_only})):
        try:
            own.bind(*args, **kwargs)
        except TypeError as error:
            problems.append(f"{spec.name}: called with {args} {list(kwargs)}: {error}")
    return problems


@pytest.mark.parametrize("mode", ["off", "observe", "balance"])
def test_undo_gives_every_original_back_and_wrappers_can_be_called_as_upstream(mode):
    answers = in_a_process(_apply_and_revert, mode)
    ours = {"train-step", "parse-args", "setup-model-and-optimizer", "forward-step"}
    assert ours & set(answers["names"]) == (set() if mode == "off" else ours)
    assert ("exact-grad-norm" in answers["names"]) == (mode == "balance")
    assert answers["unchanged"] == []
    assert answers["states"] == ["applied"]
    assert answers["signatures"] == []
    assert answers["not restored"] == [] and answers["status"] == []
    assert answers["left over"] == []


def _refused(breaking: str) -> tuple[str, list[str]]:
    """Break Megatron in one way, try to enable, and return the error and what was changed."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    from megatron_dynmo.patching import symbols

    if breaking == "renamed parameter":
        source = "def train_step(forward_step_func, data_iterator, model, optim): pass"
        exec(source, vars(training))  # in the module itself, so that it is Megatron's own
    elif breaking == "missing symbol":
        del schedules.backward_step
    elif breaking == "foreign overlay":
        original = training.train_step
        training.train_step = functools.wraps(original)(lambda *a, **k: original(*a, **k))
    elif breaking == "undeclared binding":
        training.a_new_use = schedules.forward_step
    else:
        assert breaking == "unsupported version"
        symbols.installed_version = lambda name: "0.20.1"
    addresses = [a for spec in _specs() for a in spec.addresses if "backward_step" not in a]
    before = {a: _value(a) for a in addresses}
    with pytest.raises(PatchError) as caught:
        megatron_dynmo.enable(DynMoConfig(device="cpu"))
    assert megatron_dynmo.patch_status() == []
    return str(caught.value), [a for a in addresses if _value(a) is not before[a]]


@pytest.mark.parametrize(
    ("breaking", "words"),
    [
        (
            "renamed parameter",
            ["parameters differ", "train-step (megatron.training.training:train_step)", "optim)",
             "forward_backward_func, iteration"],
        ),
        (
            "missing symbol",
            ["missing target", "megatron.core.pipeline_parallel.schedules:backward_step"],
        ),
        ("foreign overlay", ["changed by a stranger", "train-step", "test_patch_contracts"]),
        (
            "undeclared binding",
            ["undeclared binding", "forward-step", "megatron.training.training:a_new_use"],
        ),
        (
            "unsupported version",
            ["unsupported version", "megatron-core>=0.19,<0.20", "megatron-core 0.20.1"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_megatron_that_looks_different_is_refused_whole(breaking, words):
    text, changed = in_a_process(_refused, breaking)
    assert changed == []
    assert "nothing was changed" in text
    for word in words:
        assert word in text, text
    if breaking != "unsupported version":  # which concerns every patch of Megatron at once
        assert text.startswith("1 problem;"), text


def _overlaid() -> str:
    """Somebody patches on top of ours; undoing then changes nothing and names the place."""
    from megatron.training import training

    megatron_dynmo.enable(DynMoConfig(device="cpu"))
    ours = training.train_step
    training.train_step = lambda *a, **k: ours(*a, **k)
    with pytest.raises(PatchConflict) as caught:
        megatron_dynmo.disable()
    assert {r.state for r in megatron_dynmo.patch_status()} == {"applied", "overlaid"}
    training.train_step = ours
    megatron_dynmo.disable()
    assert megatron_dynmo.patch_status() == []
    return str(caught.value)


def test_a_patch_on_top_of_ours_is_never_thrown_away():
    text = in_a_process(_overlaid)
    assert "megatron.training.training:train_step" in text and "stranger" in text


def _other_settings() -> str:
    megatron_dynmo.enable(DynMoConfig(mode="observe", device="cpu"))
    with pytest.raises(PatchError) as caught:
        megatron_dynmo.enable(DynMoConfig(mode="balance", device="cpu"))
    return str(caught.value)


def test_two_settings_in_one_process_are_refused():
    assert "other patches are active already" in in_a_process(_other_settings)
