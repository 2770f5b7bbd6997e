"""Reading and writing costs.json, which `dynmo plan` takes; `profile` events hold the same."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.errors import ConfigError

__all__ = ["costs_from_json", "costs_to_json", "read_costs", "write_costs"]

_REQUIRED_OF_A_LAYER = ("layer_number", "forward_ms", "backward_ms")
_TOP_LEVEL = ("layers", "first_stage_extra", "last_stage_extra", "num_microbatches", "p2p_ms")


def read_costs(path: Path | str) -> ModelCosts:
    """Read a costs.json.

    Raises:
        ConfigError: the file is missing, is not JSON, or a field is missing, unknown or no number;
            the text names the file and the field.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read costs from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    try:
        return costs_from_json(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def write_costs(path: Path | str, costs: ModelCosts) -> None:
    """Write a costs.json that `read_costs` gives back equal."""
    text = json.dumps(costs_to_json(costs), indent=1, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def costs_to_json(costs: ModelCosts) -> dict[str, Any]:
    """The JSON document of some costs."""
    return asdict(costs) | {"layers": [asdict(layer) for layer in costs.layers]}


def costs_from_json(document: Any) -> ModelCosts:
    """Check a parsed document and make costs of it.

    Only `layers`, with `layer_number`, `forward_ms` and `backward_ms` each, is required.

    Raises:
        ConfigError: naming the field, what it holds and what it must hold.
    """
    _check_object(document, "the document", _TOP_LEVEL)
    rows = document.get("layers")
    if not isinstance(rows, list) or not rows:
        raise ConfigError("layers must be a list of at least one layer")
    layers = []
    for index, row in enumerate(rows):
        where = f"layers[{index}]"
        known = [field.name for field in fields(LayerCost)]
        _check_object(row, where, known)
        missing = [name for name in _REQUIRED_OF_A_LAYER if name not in row]
        if missing:
            raise ConfigError(f"{where} lacks {', '.join(missing)}")
        if row["layer_number"] != index + 1:
            raise ConfigError(
                f"{where}.layer_number is {row['layer_number']!r}, must be {index + 1}: layers are "
                "listed in order from 1 without gaps"
            )
        layers.append(LayerCost(**_numbers(row, where)))
    return ModelCosts(
        layers=tuple(layers),
        first_stage_extra=_extra(document, "first_stage_extra"),
        last_stage_extra=_extra(document, "last_stage_extra"),
        num_microbatches=_number(
            document.get("num_microbatches", 1), "num_microbatches", whole=True, least=1
        ),
        p2p_ms=_number(document.get("p2p_ms", 0.0), "p2p_ms"),
    )


def _extra(document: dict[str, Any], name: str) -> ExtraCost:
    row = document.get(name, {})
    _check_object(row, name, [field.name for field in fields(ExtraCost)])
    return ExtraCost(**_numbers(row, name))


def _check_object(value: Any, where: str, known: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object, is {type(value).__name__}")
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise ConfigError(f"{where} has unknown {', '.join(unknown)}; known: {', '.join(known)}")


def _numbers(row: dict[str, Any], where: str) -> dict[str, Any]:
    return {
        name: _number(value, f"{where}.{name}", whole=not name.endswith("_ms"))
        for name, value in row.items()
    }


def _number(value: Any, where: str, *, whole: bool = False, least: int = 0) -> Any:
    """A finite number of at least `least`; an integer where whole is set."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and value >= least and (not whole or value == int(value)):
        return int(value) if whole else float(value)
    kind = "a whole" if whole else "a finite"
    raise ConfigError(f"{where} is {value!r}, must be {kind} number of at least {least}")
