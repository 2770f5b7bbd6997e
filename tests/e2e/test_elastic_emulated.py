"""A run packs itself when the load collapses, and comes back when it grows: emulated devices."""

import pytest

from tests.e2e.emulation import MESSAGE_BYTES, of_kind, run_emulated

FROZEN = {"kind": "step", "from": {"1": 1.0, "8": 0.001, "45": 1.0}}
LOAD = {
    "num_layers": 8,
    "every_layer": {
        **{"forward_ms": 10.0, "backward_ms": 20.0, "memory_bytes": 1_000_000},
        "scale": FROZEN,
    },
    "layers": [{"layer_number": n, "scale": 1.0} for n in (7, 8)],
    "link": {"latency_ms": 0.01, "bandwidth_gb_s": 25, "message_bytes": MESSAGE_BYTES},
    "migration": {"bandwidth_gb_s": 25, "rebuild_ms": 1},
}


def run(folder, *flags):
    return run_emulated(
        folder, LOAD, "Ett|tt|tt|ttL", *flags, num_stages=4, num_layers=8, num_microbatches=8,
        iterations=80,
    )  # fmt: skip


def times(events, first, last):
    found = {e["iteration"]: e["iteration_ms"] for e in of_kind(events, "iteration")}
    return sorted(found[i] for i in range(first, last))


@pytest.mark.matrix
def test_load_that_collapses_and_grows(tmp_path):
    packed = run(tmp_path / "on", "--dynmo-pack", "on")
    advised = run(tmp_path / "advise")
    changes = [e for e in packed if e["event"] in ("pack", "park", "rejoin")]
    assert [(e["event"], e["ranks"]) for e in changes] == [
        ("pack", [1, 2]),
        ("park", [1, 2]),
        ("rejoin", [1, 2]),
    ]
    packed_at, back_at = changes[0]["iteration"], changes[2]["iteration"]
    assert 8 < packed_at < 30 and 45 < back_at < 65
    # Packing costs what was predicted and no more, and coming back brings the old speed.
    before, during = times(advised, 30, 44), times(packed, 30, 44)
    assert during[len(during) // 2] <= before[len(before) // 2] * 1.02
    assert times(packed, 70, 80)[5] <= times(advised, 70, 80)[5] * 1.01
    # The decision was said twice and explained; without being told to, nobody leaves.
    said = [e for e in packed if e["event"] == "decision" and e["action"] in ("advise", "pack")]
    assert [e["action"] for e in said] == ["advise", "pack", "advise", "pack"]
    assert "2 of 4 stages suffice" in said[1]["reason"] and "2 ranks" in said[1]["reason"]
    assert not [e for e in advised if e["event"] in ("pack", "park", "rejoin")]
    only_said = [e for e in advised if e["event"] == "decision" and e["action"] == "advise"]
    assert "--dynmo-pack on does it" in only_said[0]["reason"]
    # Not one bit of the training depends on it.
    losses = [[e["lm_loss_hex"] for e in of_kind(r, "iteration")] for r in (packed, advised)]
    assert losses[0] == losses[1] and len(losses[0]) == 80
