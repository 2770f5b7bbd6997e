"""Reading an emulation file, the argument of `--dynmo-emulate`; docs/emulation.md describes it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.cost_file import read_costs
from megatron_dynmo.emulate.devices import Emulation, Link, MoveCost, UnitCosts
from megatron_dynmo.emulate.fields import check_object, number
from megatron_dynmo.emulate.over_time import Constant, OverTime, over_time
from megatron_dynmo.errors import ConfigError

__all__ = ["emulation_from_json", "read_emulation"]

_UNIT = ("forward_ms", "backward_ms", "scale", "reduce_ms", "optimizer_ms", "memory_bytes")
_OPTIONAL = (
    "costs",
    "num_layers",
    "every_layer",
    "layers",
    "first_stage_extra",
    "last_stage_extra",
    "optimizer_ms",
    "speeds",
    "link",
)
MEASURED = "measured"


def read_emulation(path: Path | str) -> Emulation:
    """Read an emulation file.

    Raises:
        ConfigError: The file is missing, is not JSON, or a field is missing, unknown or wrong; the
            text names the file and the field.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the emulation from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    try:
        return emulation_from_json(document, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def emulation_from_json(document: Any, folder: Path = Path()) -> Emulation:
    """Check a parsed document and make an emulation of it.

    Args:
        document: what the file holds.
        folder: what the path in `costs` is relative to.

    Raises:
        ConfigError: Names the field, what it holds and what it must hold.
    """
    check_object(document, "the document", required=("migration",), optional=_OPTIONAL)
    base = read_costs(folder / document["costs"]) if "costs" in document else None
    layers = _layers(document, base)
    edges = {
        name: _unit(document.get(name, {}), name, _from_costs(getattr(base, name, None)))
        for name in ("first_stage_extra", "last_stage_extra")
    }
    return Emulation(
        layers=layers,
        **edges,
        optimizer_ms=over_time(document.get("optimizer_ms", 0.0), "optimizer_ms"),
        speeds=_speeds(document.get("speeds", {})),
        link=_link(document, base),
        move_cost=_move_cost(document["migration"], layers),
    )


def _layers(document: dict[str, Any], base: ModelCosts | None) -> tuple[UnitCosts, ...]:
    """Put each layer together: from costs.json, what every layer has, its own row."""
    if base is not None:
        units = [_from_costs(layer) for layer in base.layers]
    else:
        if "num_layers" not in document:
            raise ConfigError("give num_layers, or costs, which is the path of a costs.json")
        count = number(document["num_layers"], "num_layers", is_positive=True, is_whole=True)
        units = [UnitCosts()] * int(count)
    if base is not None and document.get("num_layers", len(units)) != len(units):
        raise ConfigError(f"num_layers is {document['num_layers']}, costs has {len(units)} layers")
    units = [_unit(document.get("every_layer", {}), "every_layer", unit) for unit in units]
    rows = document.get("layers", [])
    if not isinstance(rows, list):
        raise ConfigError(f"layers must be a list, is {type(rows).__name__}")
    for index, row in enumerate(rows):
        where = f"layers[{index}]"
        check_object(row, where, required=("layer_number",), optional=_UNIT)
        named = number(row["layer_number"], f"{where}.layer_number", is_whole=True)
        layer_number = int(named)
        if not 1 <= layer_number <= len(units):
            raise ConfigError(
                f"{where}.layer_number is {layer_number}, must be from 1 to {len(units)}"
            )
        own = {name: value for name, value in row.items() if name != "layer_number"}
        units[layer_number - 1] = _unit(own, where, units[layer_number - 1])
    return tuple(units)


def _unit(row: Any, where: str, base: UnitCosts) -> UnitCosts:
    """Replace what a row gives."""
    check_object(row, where, optional=_UNIT)
    changes: dict[str, Any] = {
        name: over_time(value, f"{where}.{name}")
        for name, value in row.items()
        if name != "memory_bytes"
    }
    if "memory_bytes" in row:
        size = number(row["memory_bytes"], f"{where}.memory_bytes", is_whole=True)
        changes["memory_bytes"] = int(size)
    return dataclasses.replace(base, **changes)


def _from_costs(cost: LayerCost | ExtraCost | None) -> UnitCosts:
    """Take over what costs.json says of a layer or an edge."""
    if cost is None:
        return UnitCosts()
    return UnitCosts(
        forward_ms=Constant(cost.forward_ms),
        backward_ms=Constant(cost.backward_ms),
        reduce_ms=Constant(cost.reduce_ms),
        optimizer_ms=Constant(cost.optimizer_ms),
        memory_bytes=cost.memory_bytes,
    )


def _speeds(rows: Any) -> dict[int, OverTime]:
    """Read `{"2": 0.5}`: rank 2 is half as fast as the others."""
    if not isinstance(rows, dict):
        raise ConfigError(f"speeds must be an object of pp_rank: speed, is {type(rows).__name__}")
    speeds = {}
    for text, value in rows.items():
        if not text.isdecimal():
            raise ConfigError(f"speeds has {text!r}, must be a pp_rank such as 0")
        speeds[int(text)] = over_time(value, f"speeds.{text}", is_positive=True)
    return speeds


def _link(document: dict[str, Any], base: ModelCosts | None) -> Link:
    """Read the link; without one, a costs.json gives the latency."""
    if "link" not in document:
        return Link(latency_ms=base.p2p_ms if base is not None else 0.0)
    row = document["link"]
    names = ("latency_ms", "bandwidth_gb_s", "message_bytes")
    check_object(row, "link", optional=names)
    bandwidth, size = row.get("bandwidth_gb_s"), row.get("message_bytes")
    if size is not None and bandwidth is None:
        raise ConfigError("link.message_bytes needs link.bandwidth_gb_s, or it has no effect")
    return Link(
        latency_ms=number(row.get("latency_ms", 0.0), "link.latency_ms"),
        bandwidth_gb_s=None
        if bandwidth is None
        else number(bandwidth, "link.bandwidth_gb_s", is_positive=True),
        message_bytes=None
        if size is None
        else int(number(size, "link.message_bytes", is_whole=True)),
    )


def _move_cost(row: Any, layers: tuple[UnitCosts, ...]) -> MoveCost | None:
    """Read `"measured"`, or a stated bandwidth."""
    if row == MEASURED:
        return None
    if not isinstance(row, dict):
        raise ConfigError(
            f'migration is {row!r}, must be "{MEASURED}" or an object with bandwidth_gb_s and '
            "rebuild_ms"
        )
    check_object(row, "migration", required=("bandwidth_gb_s", "rebuild_ms"))
    weightless = [index for index, unit in enumerate(layers, 1) if not unit.memory_bytes]
    if weightless:
        raise ConfigError(
            f"migration.bandwidth_gb_s needs the memory_bytes of every layer; layers {weightless} "
            "have none"
        )
    bandwidth = number(row["bandwidth_gb_s"], "migration.bandwidth_gb_s", is_positive=True)
    return MoveCost(bandwidth, number(row["rebuild_ms"], "migration.rebuild_ms"))
