"""Who may import what: the rules hold, and no module is outside them."""

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import megatron_dynmo

ROOT = Path(__file__).parents[2]
# The only places that may import Megatron, and so need no rule against it.
MEGATRON_TIER = {"adapters", "patches", "cpu", "dynamics", "pretrain_gpt"}


def contracts() -> list[dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_the_import_rules_hold():
    code = "import sys; from importlinter.cli import lint_imports_command as lint; sys.exit(lint())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_module_is_in_one_tier():
    tiers = {
        contract["id"]: {name.partition(".")[2] for name in contract["source_modules"]}
        for contract in contracts()
        if contract["id"] in ("pure", "torch", "lazy")
    }
    listed = [*MEGATRON_TIER, *(name for names in tiers.values() for name in names)]
    assert len(listed) == len(set(listed)), "a module in two tiers"
    found = {module.name for module in pkgutil.iter_modules(megatron_dynmo.__path__)}
    assert found - set(listed) == set(), "not in any tier of pyproject.toml"
    assert set(listed) - found <= {"dynamics"}, "in a tier, but not there"


def test_the_package_itself_and_its_pure_part_load_neither_torch_nor_megatron():
    (pure,) = (c["source_modules"] for c in contracts() if c["id"] == "pure")
    code = (
        "import importlib, sys\n"
        "sys.modules.update(torch=None, megatron=None)\n"
        f"for name in ['megatron_dynmo', *{pure!r}]: importlib.import_module(name)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
