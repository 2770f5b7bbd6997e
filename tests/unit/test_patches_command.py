"""`dynmo patches` on the toy package."""

import json
import sys
from dataclasses import replace

import packaging
import pytest

from megatron_dynmo import patches
from megatron_dynmo.__main__ import main
from megatron_dynmo.commands.patches import markdown_table
from megatron_dynmo.patching import PatchSet, patched
from megatron_dynmo.patching.symbols import source_digest
from tests.unit.toy_patches import SPECS, STEP, spec


@pytest.fixture
def declare(monkeypatch, toy_path):
    """Let the command see these patches instead of the real ones."""

    def declare(*specs):
        monkeypatch.setattr(patches, "all_specs", lambda: specs, raising=False)

    return declare


def dynmo(capsys, *words):
    status = main(["patches", *words])
    return status, capsys.readouterr().out


def test_list(declare, capsys):
    declare(*SPECS)
    status, out = dynmo(capsys, "list", "--json")
    records = json.loads(out)
    assert status == 0
    assert [record["name"] for record in records] == [spec.name for spec in SPECS]
    assert records[0]["bindings"] == list(STEP.bindings)
    assert {record["state"] for record in records} == {"not applied"}
    status, out = dynmo(capsys, "list")
    assert status == 0 and f"{len(SPECS)} patches" in out and "extra-m" in out


def test_list_shows_what_is_active(declare, capsys):
    declare(*SPECS)
    with patched([STEP]):
        _, out = dynmo(capsys, "list", "--json")
    assert [record["state"] for record in json.loads(out)] == ["applied"]


def test_check_passes(declare, capsys):
    declare(*SPECS)
    status, out = dynmo(capsys, "check")
    assert status == 0 and f"{len(SPECS)} patches fit" in out
    assert dynmo(capsys, "check", "--json") == (0, "[]\n")


def test_check_fails_with_every_problem(declare, capsys):
    broken = replace(STEP, params=("a[b]",), requires="packaging<2")
    declare(broken, spec("gone", "gone"))
    status, out = dynmo(capsys, "check", "--json")
    assert status == 1
    kinds = [problem["kind"] for problem in json.loads(out)]
    assert kinds == ["unsupported version", "parameters differ", "missing target"]
    status, out = dynmo(capsys, "check")
    assert status == 1 and "3 problems" in out and "[b]" in out


def test_digest_can_be_pasted(declare, capsys):
    declare(*SPECS)
    status, out = dynmo(capsys, "digest")
    step = sys.modules["toy_package.core"].step
    assert status == 0
    assert f'step: "{packaging.__version__}": "{source_digest(step)}",\n' in out
    names = {line.partition(":")[0] for line in out.splitlines()}
    assert "run" in names and not names & {"total", "limit", "extra", "extra-method"}
    _, out = dynmo(capsys, "digest", "--json")
    digests = json.loads(out)["digests"]
    specs = [replace(spec, digests=digests.get(spec.name, {})) for spec in SPECS]
    assert PatchSet(specs).check() == []


def test_digest_is_that_of_the_original_while_patched(declare, capsys):
    declare(STEP)
    before = dynmo(capsys, "digest")
    with patched([STEP]):
        assert dynmo(capsys, "digest") == before


def test_digest_of_a_missing_target(declare, capsys):
    declare(spec("gone", "gone"), STEP)
    status, out = dynmo(capsys, "digest", "--json")
    result = json.loads(out)
    assert status == 1
    assert list(result["digests"]) == ["step"]
    assert len(result["missing"]) == 1 and "gone" in result["missing"][0]


def test_markdown_table():
    text = markdown_table([replace(STEP, reason="either a | b,\n  or c"), SPECS[-1]])
    lines = text.splitlines()
    assert len(lines) == 4
    assert "`toy_package.core:step`<br>`toy_package:step`" in lines[2]
    assert "either a \\| b, or c" in lines[2]
    assert {line.replace("\\|", "").count("|") for line in lines} == {7}
