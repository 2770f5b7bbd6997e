"""A move succeeds everywhere or leaves the old layout; whatever fails, every rank hears of it."""

import itertools
import os
import time
from pathlib import Path

import pytest
import torch

from megatron_dynmo.consensus import Consensus
from megatron_dynmo.errors import DynMoError, MigrationError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.migrator import Migrator, MoveRefused
from megatron_dynmo.plan import LayerMove, build_plan
from megatron_dynmo.transport import Parcel, Transport
from tests.distributed.memory_stage import STEPS, MemoryStage, new_layer
from tests.ranks import RanksFailed, run_ranks

RANKS = 3
OLD, NEW = "Ettt|t|ttL", "Et|ttt|ttL"  # 2 and 3 go from 0 to 1, 4 stays
BUSY = "Et|tttt|tL"  # 2, 3 from 0 to 1 and 5 from 2 to 1: the middle rank hears from both sides
RING = "E|ttttt|tL"


def layout(text: str) -> LayerLayout:
    return LayerLayout.from_megatron(text, num_layers=6, num_stages=RANKS)


def make(rank: int, stage: MemoryStage, **options) -> Migrator:
    # A group of its own, as a pipeline's is: gloo closes a group's links after a timeout.
    group = torch.distributed.new_group(range(RANKS))
    transport, late = (
        Transport(group, range(RANKS), torch.device("cpu"), tag=tag, **options) for tag in (0, 1)
    )
    return Migrator(rank, stage, transport, Consensus(torch.device("cpu")), late)


def expected(rank: int, text: str) -> dict[int, list[list[float]]]:
    return {
        n: [tensor.tolist() for tensor in new_layer(n).values()]
        for n in layout(text).layers_of(rank)
    }


def _walk(rank: int, world_size: int, overlap: bool) -> list[dict[str, object]]:
    """Five moves in a row, the last one back to where it began."""
    stage = MemoryStage(rank, layout(OLD))
    migrator = make(rank, stage, chunk_bytes=16)
    path = [OLD, NEW, BUSY, RING, "Etttttt||L", OLD]
    rows = []
    for old, new in itertools.pairwise(path):
        report = migrator.migrate(build_plan(layout(old), layout(new)), overlap=overlap)
        phases = {"prepare", "transfer", "commit", "rebuild", "verify"}
        if overlap:
            weights = {n: layer["weight"].tolist() for n, layer in stage.layers().items()}
            assert weights == {n: rows[0] for n, rows in expected(rank, new).items()}
            stood_ms = report.duration_ms
            report = migrator.land()
            phases.add("landing")
            assert report.duration_ms > stood_ms and report.overlapped_ms > 0
        assert stage.contents() == expected(rank, new)
        assert set(report.phase_ms) == phases
        rows.append({"layers": report.layer_numbers, "bytes": report.num_bytes})
    assert stage.rolled_back == 0
    return rows


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "state follows"])
def test_a_walk_through_layouts_conserves_every_number(overlap):
    rows = run_ranks(_walk, RANKS, overlap)
    assert rows[0] == rows[1] == rows[2]
    for row in rows[0]:
        assert row["bytes"] == sum(4 * (7 + 3 * layer) for layer in row["layers"])
    assert [row["layers"] for row in rows[0]] == [(2, 3), (5,), (1,), (1, 2, 3, 4, 5, 6), (4, 5, 6)]


class _Meeting(MemoryStage):
    """Rank 0 gives its layer away only once rank 3 has received one."""

    def __init__(self, rank: int, layout: LayerLayout, sign: Path) -> None:
        super().__init__(rank, layout)
        self.sign = sign

    def accept(self, move: LayerMove, parcel: Parcel) -> None:
        super().accept(move, parcel)
        if self.rank == 3:
            self.sign.touch()


def _disjoint(rank: int, world_size: int, folder: str) -> list[int]:
    old, new = (
        LayerLayout.from_megatron(text, num_layers=6, num_stages=4)
        for text in ("Ett|t|tt|tL", "Et|tt|t|ttL")
    )
    stage = _Meeting(rank, old, Path(folder) / "received")
    group = torch.distributed.new_group(range(4))
    transport = Transport(group, range(4), torch.device("cpu"))
    if rank == 0:
        send = transport.send

        def send_later(*args) -> None:
            deadline = time.monotonic() + 30
            while not stage.sign.exists():
                assert time.monotonic() < deadline, "the pair 2, 3 waits for the pair 0, 1"
                time.sleep(0.01)
            send(*args)

        transport.send = send_later
    Migrator(rank, stage, transport, Consensus(torch.device("cpu"))).migrate(build_plan(old, new))
    return sorted(stage.held)


def test_pairs_of_ranks_that_share_none_move_at_the_same_time(tmp_path):
    held = run_ranks(_disjoint, 4, str(tmp_path), timeout_s=60)
    assert held == [[1], [2, 3], [4], [5, 6]]


# Faults that strike before anything has changed, and those that strike afterwards.
EARLY = ("prepare", "settle", "parcel", "slots", "accept", "wrong shape")
LATE = ("commit", "restore", "check_ownership", "damage", "lose a layer", "touch the rest")
assert set(STEPS) <= {*EARLY, *LATE, "rebuild"}


def _faults(rank: int, world_size: int, faults: list[str]) -> dict[tuple[str, int], dict]:
    """Inject each fault into each rank, one after another over one group."""
    table = {}
    for fault in faults:
        for struck in range(RANKS):
            stage = MemoryStage(rank, layout(OLD), fault if rank == struck else None)
            migrator = make(rank, stage)
            outcome, text = "moved", ""
            try:
                migrator.migrate(build_plan(layout(OLD), layout(BUSY)))
            except MigrationError as error:
                outcome, text = type(error).__name__, str(error)
            table[fault, struck] = {
                "outcome": outcome,
                "text": text,
                "held": [t for t in (OLD, BUSY) if stage.contents() == expected(rank, t)],
                "rolled_back": stage.rolled_back,
            }
            if outcome == MoveRefused.__name__:
                # The same objects go on to make the move that was refused.
                stage.fault = None
                migrator.migrate(build_plan(layout(OLD), layout(BUSY)))
                assert stage.contents() == expected(rank, BUSY)
    return table


def is_struck(fault: str, rank: int) -> bool:
    """Whether the step happens on this rank at all: rank 0 and 2 send, rank 1 receives."""
    receives, sends = rank == 1, rank in (0, 2)
    needs = {"parcel": sends, "slots": receives, "accept": receives, "wrong shape": receives,
             "damage": receives, "lose a layer": receives}  # fmt: skip
    return needs.get(fault, True)


def test_a_fault_before_commit_leaves_the_old_layout_on_every_rank():
    tables = run_ranks(_faults, RANKS, list(EARLY), timeout_s=60)
    for cell in tables[0]:
        fault, struck = cell
        rows = [table[cell] for table in tables]
        if not is_struck(fault, struck):
            assert all(row["outcome"] == "moved" and row["held"] == [BUSY] for row in rows), cell
            continue
        assert len({row["text"] for row in rows}) == 1, cell
        for row in rows:
            assert row["outcome"] == MoveRefused.__name__, (cell, row)
            assert row["held"] == [OLD] and row["rolled_back"] == 1, (cell, row)
        text = rows[0]["text"]
        phase = "prepare" if fault in ("prepare", "settle") else "transfer"
        assert f"failed in {phase}: rank {struck}: " in text, (cell, text)
        assert f"Every rank still holds {layout(OLD)}" in text
        if fault == "wrong shape":
            assert "weight is float32[7], wanted float32[8]" in text
        else:
            assert f"injected into {fault}" in text


def test_a_fault_after_that_stops_every_rank_with_what_each_holds():
    tables = run_ranks(_faults, RANKS, list(LATE), timeout_s=60)
    for cell in tables[0]:
        fault, struck = cell
        rows = [table[cell] for table in tables]
        if not is_struck(fault, struck):
            assert all(row["outcome"] == "moved" for row in rows), cell
            continue
        assert len({row["text"] for row in rows}) == 1, cell
        for row in rows:
            assert row["outcome"] == MigrationError.__name__, (cell, row)
            assert row["rolled_back"] == 0
        text = rows[0]["text"]
        phase = {"commit": "commit", "restore": "rebuild"}.get(fault, "verify")
        assert f"failed in {phase}: rank {struck}: MigrationError: holding layers [" in text, text
        assert f"Every other rank holds its layers of {layout(BUSY)}" in text
        assert "restart from the last checkpoint" in text
        for other, row in enumerate(rows):
            if other != struck:
                assert row["held"] == [BUSY], (cell, row)


def test_damage_on_the_way_is_named():
    tables = run_ranks(_faults, RANKS, ["damage"], timeout_s=60)
    assert "state changed on its way: layer 2, layer 3, layer 5" in tables[0]["damage", 1]["text"]


def _odd_ones(rank: int, world_size: int) -> dict[str, str]:
    """A plan that differs on one rank, and a way back that fails."""
    stage = MemoryStage(rank, layout(OLD))
    said = {}
    with pytest.raises(DynMoError) as caught:
        make(rank, stage).migrate(build_plan(layout(OLD), layout(NEW if rank == 1 else BUSY)))
    said["other plan"] = str(caught.value)
    assert stage.contents() == expected(rank, OLD) and stage.calls == []

    stage = MemoryStage(rank, layout(OLD), {0: "prepare", 2: "rollback"}.get(rank))
    with pytest.raises(MigrationError) as caught:
        make(rank, stage).migrate(build_plan(layout(OLD), layout(BUSY)))
    assert not isinstance(caught.value, MoveRefused)
    said["no way back"] = str(caught.value)
    return said


def test_ranks_that_disagree_and_a_way_back_that_fails():
    said = run_ranks(_odd_ones, RANKS)
    assert said[0] == said[1] == said[2]
    assert "ranks disagree on the migration plan: [1] differ" in said[0]["other plan"]
    assert "rank 0: MemoryError: injected into prepare" in said[0]["no way back"]
    assert (
        "going back failed too: rank 2: MemoryError: injected into rollback"
        in (said[0]["no way back"])
    )


class _Answer(Exception):
    """What a rank has to say although the run as a whole fails."""


def _rebuild_fails(rank: int, world_size: int) -> None:
    """In a collective of Megatron's nothing can be agreed: the rank that fails ends by itself."""
    stage = MemoryStage(rank, layout(OLD), "rebuild" if rank == 0 else None)
    with pytest.raises(MigrationError) as caught:
        make(rank, stage).migrate(build_plan(layout(OLD), layout(BUSY)))
    assert not isinstance(caught.value, MoveRefused)
    raise _Answer(str(caught.value))


def test_a_rank_that_fails_in_rebuild_ends_and_the_others_with_it():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_rebuild_fails, RANKS, timeout_s=60)
    assert failed.value.rank == 0
    answer = failed.value.errors[0]
    assert "failed in rebuild on this rank, holding layers [1], MemoryError: injected" in answer
    assert f"Every other rank holds its layers of {layout(BUSY)}" in answer
    for rank in (1, 2):
        answer = failed.value.errors[rank]
        assert "_Answer: " in answer and "a rank was lost in rebuild" in answer, answer


class _Failing(MemoryStage):
    """Dies, or falls asleep for longer than its peers wait, when it is to send a layer."""

    def parcel(self, layer_number):
        if self.fault == "dies":
            os._exit(3)
        if self.fault == "sleeps":
            time.sleep(6)
        return super().parcel(layer_number)


def _lost(rank: int, world_size: int, fault: str) -> str:
    stage = _Failing(rank, layout(OLD), fault if rank == 0 else None)
    with pytest.raises(MigrationError) as caught:
        make(rank, stage, timeout_s=2).migrate(build_plan(layout(OLD), layout(BUSY)))
    assert not isinstance(caught.value, MoveRefused)
    assert stage.contents() == expected(rank, OLD)
    if fault == "dies":
        raise _Answer(str(caught.value))
    return str(caught.value)


def test_a_rank_that_dies_stops_the_others_and_does_not_hang_them():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_lost, RANKS, "dies", timeout_s=60)
    assert "died" in failed.value.errors[0]
    for rank in (1, 2):
        answer = failed.value.errors[rank]
        assert "_Answer: " in answer and "a rank was lost in transfer" in answer, answer
        assert f"This rank holds layers {list(layout(OLD).layers_of(rank))}" in answer


def test_a_rank_that_sleeps_too_long_stops_all_with_the_old_layout():
    said = run_ranks(_lost, RANKS, "sleeps", timeout_s=60)
    assert said[0] == said[1] == said[2]
    assert "PeerLost: receiving layer 2 from pp_rank 0 failed" in said[0]
    assert f"Every rank still holds {layout(OLD)}, but a link between ranks is lost" in said[0]
