"""Whatever strikes a move, wherever and when: the old layout and on, or a stop that says why."""

import json
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_dynmo.checksum import checksum
from megatron_dynmo.consensus import Consensus
from megatron_dynmo.errors import MigrationError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.migrator import Migrator, MoveRefused
from megatron_dynmo.plan import build_plan
from megatron_dynmo.transport import Transport
from tests.distributed.memory_stage import MemoryStage, layers_of, new_layer
from tests.fault_table import (
    BITFLIP,
    CONTINUED,
    HANG,
    MEMORY,
    MEMORY_CELLS,
    SILENT,
    STOPPED,
    Cell,
    wanted,
)
from tests.ranks import RanksFailed, run_ranks

RANKS = 3
LAYERS = 9
# Two chunks a rank: layer 2 goes from rank 0 to 1, layer 4 from 1 to 2 and layer 6 from 2 to 0.
OLD, NEW = "Ett|tt|tt|t|t|tL", "Et|tt|tt|tt|t|tL"
# A fault strikes the first of its phase's steps that every rank makes.
STEP = {
    "prepare": "prepare",
    "transfer": "parcel",
    "commit": "commit",
    "rebuild": "rebuild",
    "verify": "check_ownership",
    "landing": "late",
}
PATIENT_S, IMPATIENT_S = 30.0, 3.0
# Beyond the limit: for the machine to notice, and for the sleeper to wake.
SLACK_S = 20.0


class _Ends(Exception):
    """A rank that was told to stop stops."""


@dataclass
class Fault:
    """What happens to a rank when its move comes to a step; nothing when it is not `armed`."""

    kind: str
    step: str
    armed: bool = True

    def strike(self, stage: "FaultyStage", step: str) -> None:
        if not self.armed or step != self.step:
            return
        if self.kind == "exception":
            raise ValueError("injected")
        if self.kind == "out of memory":
            raise torch.OutOfMemoryError("injected: out of memory")
        if self.kind == "timeout":
            self.armed = False
            time.sleep(IMPATIENT_S + 2)
        if self.kind == "killed process":
            os._exit(9)
        if self.kind == "wrong shape":
            stage.spoil(step)


class FaultyStage(MemoryStage):
    """A stage whose `settle` and `rebuild` are collectives, as Megatron's are."""

    def __init__(self, rank: int, layout: LayerLayout, group, fault: Fault | None) -> None:
        super().__init__(rank, layout)
        self.group = group
        self.injected = fault

    def _at(self, step):
        if self.injected is not None:
            self.injected.strike(self, step)
        if step in ("settle", "rebuild"):
            self.meet()

    def meet(self) -> None:
        """Wait for every rank, as a step of training does."""
        count = torch.ones(1)
        dist.all_reduce(count, group=self.group)
        assert count.item() == RANKS

    def spoil(self, step: str) -> None:
        """Give a tensor that the step works on another shape."""
        if step == "prepare":
            for slots in self.incoming.values():
                slots["weight"] = torch.zeros(8)
        elif step == "parcel":
            self.sends_wrong_shape = True
        else:
            number = next(iter(self.held))
            self.held[number] = {**self.held[number], "weight": torch.zeros(8)}

    sends_wrong_shape = False

    def parcel(self, layer_number):
        parcel = super().parcel(layer_number)
        if self.sends_wrong_shape:
            parcel.tensors["weight"] = torch.zeros(8)
        return parcel

    def accept(self, move, parcel):
        super().accept(move, parcel)
        fault = self.injected
        if fault is not None and fault.armed and (fault.kind, fault.step) == (BITFLIP, "parcel"):
            self.incoming[move.layer_number]["weight"].view(torch.int32)[3] ^= 1

    def fingerprint(self, parcel):
        # In another thread: of what has followed a layer, as it arrived.
        if self.injected is not None and threading.current_thread() is not threading.main_thread():
            if self.injected.kind == "wrong shape":
                parcel.tensors["state/moment"] = torch.zeros(8)
            elif self.injected.kind == BITFLIP:
                parcel.tensors["state/moment"].view(-1).view(torch.int32)[0] ^= 1
            else:
                self.injected.strike(self, "late")
        return super().fingerprint(parcel)

    def rollback(self) -> None:
        super().rollback()
        self.sends_wrong_shape = False

    def is_exactly(self, text: str) -> bool:
        """Whether it holds the layers of a layout with every bit as it began."""
        wanted = layers_of(_layout(text), self.rank)
        return tuple(self.held) == wanted and all(
            checksum(self.held[n].values()) == checksum(new_layer(n).values()) for n in wanted
        )


def _layout(text: str) -> LayerLayout:
    return LayerLayout.from_megatron(text, num_layers=LAYERS, num_stages=RANKS)


def _strike(rank: int, world_size: int, cell: Cell, folder: str) -> None:
    """Move once with the fault, leave what came of it in a file, and go on or end."""
    limit_s = IMPATIENT_S if cell.fault == "timeout" else PATIENT_S
    # Groups of their own with the limit of this cell, as Megatron's are.
    groups = [dist.new_group(range(RANKS), timeout=timedelta(seconds=limit_s)) for _ in range(2)]
    fault = Fault(cell.fault, STEP[cell.phase]) if rank == cell.rank else None
    stage = FaultyStage(rank, _layout(OLD), groups[0], fault)
    transport = Transport(groups[1], range(RANKS), torch.device("cpu"), timeout_s=limit_s)
    late = Transport(groups[1], range(RANKS), torch.device("cpu"), timeout_s=limit_s, tag=1)
    migrator = Migrator(rank, stage, transport, Consensus(torch.device("cpu"), groups[0]), late)
    plan = build_plan(_layout(OLD), _layout(NEW))
    started = time.monotonic()
    try:
        migrator.migrate(plan, overlap=cell.phase == "landing")
        if cell.phase == "landing":
            migrator.land()
        ended, said = "moved", ""
    except Exception as error:
        ended, said = type(error).__name__, str(error)
        is_explained = isinstance(error, MigrationError) and not isinstance(error, MoveRefused)
    answer = {"ended": ended, "said": said, "seconds": time.monotonic() - started}
    if ended == MoveRefused.__name__:
        answer["is_old"] = stage.is_exactly(OLD)
        if fault is not None:
            fault.armed = False
        stage.meet()
        migrator.migrate(plan)
        answer["is_new"] = stage.is_exactly(NEW)
    elif ended != "moved":
        answer["is_explained"] = is_explained
    Path(folder, f"rank{rank}.json").write_text(json.dumps(answer))
    if "is_explained" in answer:
        raise _Ends(said)


def outcome_of(cell: Cell, folder: Path) -> tuple[str, dict[int, dict]]:
    """Run a cell; how it ended, and what each living rank said."""
    limit_s = IMPATIENT_S if cell.fault == "timeout" else PATIENT_S
    try:
        run_ranks(_strike, RANKS, cell, str(folder), timeout_s=limit_s + SLACK_S)
    except RanksFailed as failed:
        text = str(failed)
    else:
        text = ""
    answers = {
        rank: json.loads(path.read_text())
        for rank in range(RANKS)
        if (path := folder / f"rank{rank}.json").exists()
    }
    alive = set(range(RANKS)) - ({cell.rank} if cell.fault == "killed process" else set())
    if set(answers) != alive:
        print(text)
        return HANG, answers
    return _classify(cell, answers), answers


def _classify(cell: Cell, answers: dict[int, dict]) -> str:
    if max(answer["seconds"] for answer in answers.values()) > IMPATIENT_S + SLACK_S:
        return HANG
    if all(answer.get("is_old") and answer.get("is_new") for answer in answers.values()):
        return CONTINUED
    if all(answer.get("is_explained") for answer in answers.values()):
        return STOPPED
    return SILENT


def _check(cell: Cell, folder: Path) -> str:
    outcome, answers = outcome_of(cell, folder)
    assert outcome == wanted(cell), (cell, answers)
    for rank, answer in answers.items():
        said = answer["said"]
        assert f"moving {_layout(OLD)} to {_layout(NEW)}" in said, (cell, rank, said)
        if outcome == CONTINUED:
            assert f"Every rank still holds {_layout(OLD)}; training goes on there" in said
            assert f"rank {cell.rank}: " in said, said
        else:
            holds = ("holding layers [", "This rank holds layers [", "Every rank still holds ")
            assert any(words in said for words in holds), (cell, rank, said)
            assert "restart from the last checkpoint" in said
    return outcome


FAST = [
    Cell(MEMORY, "prepare", 1, "exception"),
    Cell(MEMORY, "transfer", 0, "out of memory"),
    Cell(MEMORY, "transfer", 2, BITFLIP),
    Cell(MEMORY, "commit", 2, "killed process"),
    Cell(MEMORY, "rebuild", 0, "out of memory"),
    Cell(MEMORY, "verify", 1, "wrong shape"),
    Cell(MEMORY, "landing", 1, "exception"),
    Cell(MEMORY, "landing", 2, BITFLIP),
]
assert set(FAST) <= set(MEMORY_CELLS)


@pytest.mark.parametrize("cell", FAST, ids=lambda cell: cell.name)
def test_a_fault_ends_as_it_must(cell, tmp_path):
    _check(cell, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("cell", MEMORY_CELLS, ids=lambda cell: cell.name)
def test_the_table(cell, tmp_path, fault_results):
    fault_results.append({**cell._asdict(), "outcome": _check(cell, tmp_path)})
