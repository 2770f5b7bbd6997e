"""All ranks hear the same of who failed and of what differs."""

import pytest
import torch

from megatron_dynmo.consensus import Consensus
from megatron_dynmo.errors import DynMoError, PeerGaveUp
from tests.ranks import run_ranks

LONG = "x" * 1000


def _agree(rank: int, world_size: int) -> dict[str, object]:
    consensus = Consensus(torch.device("cpu"))
    answers: dict[str, object] = {
        "nobody": consensus.failures(None),
        "rank 2": consensus.failures(ValueError("bad\nsecond line") if rank == 2 else None),
        "all": consensus.failures(RuntimeError(f"on {rank}")),
        "no text": consensus.failures(KeyError() if rank == 0 else None),
        "empty text": consensus.failures(ValueError("") if rank == 1 else None),
        # A cut in the middle of a letter of two bytes must not raise.
        "long": consensus.failures(ValueError("ä" * 400) if rank == 1 else None),
        "cause first": consensus.failures(
            MemoryError("no room") if rank == 2 else PeerGaveUp("the other one did")
        ),
        "total": consensus.total(10**12 + rank),
        "total of flags": consensus.total(rank == 1),
    }
    consensus.require_same("equal", "settings")
    consensus.require_same(LONG, "settings")
    with pytest.raises(DynMoError) as caught:
        consensus.require_same(f"{LONG}{rank == 1}", "settings")
    answers["differs"] = str(caught.value)
    return answers


def test_three_ranks():
    answers = run_ranks(_agree, 3)
    assert answers[0] == answers[1] == answers[2]
    found = answers[0]
    assert found["nobody"] == ""
    assert found["rank 2"] == "rank 2: ValueError: bad"
    assert found["all"] == (
        "rank 0: RuntimeError: on 0; rank 1: RuntimeError: on 1; rank 2: RuntimeError: on 2"
    )
    assert found["no text"] == "rank 0: KeyError"
    assert found["empty text"] == "rank 1: ValueError"
    assert found["long"].startswith("rank 1: ValueError: ää") and len(found["long"]) < 250
    assert found["cause first"] == (
        "rank 2: MemoryError: no room; rank 0: PeerGaveUp: the other one did; "
        "rank 1: PeerGaveUp: the other one did"
    )
    assert found["total"] == 3 * 10**12 + 3
    assert found["total of flags"] == 1
    assert "settings: [1] differ from rank 0" in found["differs"]


def _many_failures(rank: int, world_size: int) -> list[str]:
    consensus = Consensus(torch.device("cpu"))
    rows = [torch.tensor([1, 65 + number], dtype=torch.uint8) for number in range(20)]
    consensus._gather = lambda mine: rows
    return consensus.failures(None).split("; ")


def test_a_thousand_failing_ranks_do_not_fill_the_screen():
    (texts,) = run_ranks(_many_failures, 1)
    assert texts[0] == "rank 0: A" and texts[-1] == "and 12 more ranks"
    assert len(texts) == 9


def _subgroup(rank: int, world_size: int) -> str | None:
    """Only the members of the group that must agree take part."""
    group = torch.distributed.new_group([0, 2])
    if rank == 1:
        return None
    return Consensus(torch.device("cpu"), group).failures(ValueError("x") if rank == 2 else None)


def test_agreement_of_a_group():
    assert run_ranks(_subgroup, 3) == ["rank 1: ValueError: x", None, "rank 1: ValueError: x"]
