"""One training run of the benchmarks of the dynamics, real or emulated, and what it took.

Functions that ranks call are started through `tests.ranks.run_ranks`, which imports them by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_dynmo.emulate.emulation_file import emulation_from_json
from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.simulate.recorded import read_recording
from megatron_dynmo.simulate.trace import CostTrace
from megatron_dynmo.telemetry.events import read_events
from tests.ranks import run_ranks

WORDS = """
    --attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine --clip-grad 1.0 --split 98,1,1
    --eval-iters 0 --eval-interval 100000 --log-interval 1 --num-workers 0
""".split()
# Before it, a run warms up; a run that is moved to a layout at once has moved.
FIRST_ITERATION = 3


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run.

    Attributes:
        folder: where its events are.
        events: what it wrote.
        factors: [iterations, layers, 2], of a traced run: expected cost of each layer's forward
            and backward over that of the untouched layer, in the order of iterations.
        work: the same of their floating-point operations.
        is_emulated: whether its times are virtual.
    """

    folder: Path
    events: list[dict[str, Any]]
    factors: np.ndarray | None = None
    work: np.ndarray | None = None
    is_emulated: bool = False

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def iteration_ms(self) -> dict[int, float]:
        """{iteration: time of its step}."""
        return {event["iteration"]: event["iteration_ms"] for event in self.of("iteration")}

    @property
    def losses(self) -> list[tuple[str, str]]:
        """Loss and gradient norm of each iteration, to the last bit."""
        return [(e["lm_loss_hex"], e["grad_norm_hex"]) for e in self.of("iteration")]

    @property
    def lm_loss(self) -> list[float]:
        """Loss of each iteration."""
        return [event["lm_loss"] for event in self.of("iteration")]

    @property
    def digest(self) -> dict[str, Any]:
        """Of parameters and optimizer state at the end."""
        last = self.of("digest")[-1]
        return {key: last[key] for key in ("iteration", "layers", "embedding", "output")}

    @property
    def moves(self) -> list[dict[str, Any]]:
        """Moves from the first iteration that counts."""
        return [e for e in self.of("migration") if e["iteration"] >= FIRST_ITERATION - 1]

    @property
    def mean_ms(self) -> float:
        """The run from its first iteration that counts, moves included, over the iterations.

        Of a real run it is time on the wall, and so includes all that dynamics do after a step.
        """
        times = self.iteration_ms
        counted = [ms for iteration, ms in times.items() if iteration >= FIRST_ITERATION]
        if self.is_emulated:
            total_ms = sum(counted) + sum(move["duration_ms"] for move in self.moves)
        else:
            ends_s = {event["iteration"]: event["time_s"] for event in self.of("iteration")}
            total_ms = (ends_s[max(times)] - ends_s[FIRST_ITERATION - 1]) * 1e3
        return total_ms / len(counted)

    @property
    def settled(self) -> list[float]:
        """Steps of the last third, when the dynamic has done what it does."""
        times = self.iteration_ms
        return [ms for iteration, ms in times.items() if iteration > max(times) * 2 / 3]

    @property
    def settled_ms(self) -> float:
        """Their median."""
        return float(np.median(self.settled))


def train_real(folder: Path, words: Sequence[str], *, ranks: int = 2, timeout_s: float) -> Run:
    """Train with real time, rank k pinned to core k.

    Args:
        folder: where events and the ranks' output go.
        words: Megatron's and our flags, after those that all runs have.
        ranks: processes.
        timeout_s: when to give up.
    """
    run_ranks(
        pinned, ranks, *WORDS, *words, "--dynmo-log-dir", str(folder), timeout_s=timeout_s,
        log_dir=folder / "ranks",
    )  # fmt: skip
    return Run(folder, read_events(folder / EVENTS_FILE))


def train_traced(folder: Path, words: Sequence[str], *, ranks: int = 1, timeout_s: float) -> Run:
    """Train in real time on any core, and note the costs that dynamics expect; see `train_real`."""
    results = run_ranks(
        traced, ranks, *WORDS, *words, "--dynmo-log-dir", str(folder), timeout_s=timeout_s,
        log_dir=folder / "ranks",
    )  # fmt: skip
    factors, work = np.array(results[0]).swapaxes(0, 1)
    return Run(folder, read_events(folder / EVENTS_FILE), factors, work)


def train_emulated(
    folder: Path, words: Sequence[str], document: dict[str, Any], *, ranks: int, timeout_s: float
) -> Run:
    """Train on emulated devices whose costs follow the state of the dynamics.

    Args:
        folder: see `train_real`, as the others.
        words: see there.
        document: the emulation file, docs/emulation.md.
        ranks: see there.
        timeout_s: see there.
    """
    folder.mkdir(parents=True)
    file = folder / "emulation.json"
    file.write_text(json.dumps(document))
    run = train_traced(
        folder, (*words, "--dynmo-emulate", str(file)), ranks=ranks, timeout_s=timeout_s
    )
    return dataclasses.replace(run, is_emulated=True)


def pinned(rank: int, world_size: int, *argv: str) -> None:
    """Be one rank of the drop-in on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    from megatron_dynmo import pretrain_gpt

    pretrain_gpt.main(list(argv))


def traced(rank: int, world_size: int, *argv: str) -> list[list[list[tuple[float, float]]]]:
    """Be one rank of the drop-in, and note what its dynamics expect of the layers.

    Returns:
        [iterations][2][layers] (forward, backward): factors on the layers' costs, and on their
        work.
    """
    from megatron_dynmo import pretrain_gpt
    from megatron_dynmo.adapters.run import MegatronRun

    rows: list[list[list[tuple[float, float]]]] = []
    begin = MegatronRun.begin_dynamics

    def begin_dynamics(run: Any, iteration: int) -> None:
        begin(run, iteration)
        if run.dynamics is None:
            rows.append([[(1.0, 1.0)] * run.num_layers] * 2)
        else:
            kinds = run.dynamics
            both = kinds.all_factors(run.num_layers), kinds.all_work(run.num_layers)
            rows.append([[tuple(layer) for layer in layers] for layers in both])

    MegatronRun.begin_dynamics = begin_dynamics  # type: ignore[assignment, method-assign]
    pretrain_gpt.main(list(argv))
    return rows


# ------------------------------------------------------------------------- what layers cost


def recorded_trace(run: Run) -> CostTrace:
    """Costs of every iteration of a real run, as its profiler measured them."""
    return read_recording(run.folder / EVENTS_FILE).trace


def emulated_trace(run: Run, document: dict[str, Any]) -> CostTrace:
    """Costs of every iteration that counts of an emulated run, exactly."""
    emulation = emulation_from_json(document)
    assert run.factors is not None
    factors = run.factors[FIRST_ITERATION - 1 :]
    layers, edges = emulation.layers, (emulation.first_stage_extra, emulation.last_stage_extra)
    count = len(factors)
    sizes = np.array([float(layer.memory_bytes) for layer in layers])
    return CostTrace(
        forward_ms=factors[:, :, 0] * [layer.forward_at(1) for layer in layers],
        backward_ms=factors[:, :, 1] * [layer.backward_at(1) for layer in layers],
        memory_bytes=np.tile(sizes, (count, 1)),
        activation_bytes=np.zeros(len(layers)),
        parameters=sizes,
        extra_forward_ms=np.tile([edge.forward_at(1) for edge in edges], (count, 1)),
        extra_backward_ms=np.tile([edge.backward_at(1) for edge in edges], (count, 1)),
        first_iteration=FIRST_ITERATION,
    )
