"""Who decides on the split, when and how: one class for each policy that is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.baselines import best_static, deepspeed_split, paper_diffusion
from megatron_dynmo.simulate.pipeline import Boundaries, Case, Move

__all__ = ["PaperBalancing", "Policy", "Proposal", "Static", "paper_policies", "static_policies"]

type Array = NDArray[np.float64]


class Proposal(NamedTuple):
    """A split to change to, and why in one line."""

    boundaries: Boundaries
    reason: str


class Policy(Protocol):
    """Decides between iterations; used for one run, from the first row of the trace to the last."""

    name: str

    def start(self, case: Case) -> Boundaries:
        """The split to begin with."""
        ...

    def next_look(self, row: int) -> int:
        """After how many rows of the run, more than `row` of them, it wants to decide again."""
        ...

    def look(self, case: Case, row: int, boundaries: Boundaries) -> Proposal | None:
        """Decide after `row` rows; None to stay. It may see what was before row, nothing else."""
        ...

    def moved(self, move: Move) -> None:
        """Take note that the proposal was carried out, and what it cost."""
        ...


class Static:
    """One split for the whole run.

    Args:
        name: of the policy.
        split: gives the split; the one in hindsight may look at the whole run.
    """

    def __init__(self, name: str, split: Callable[[Case], Boundaries]) -> None:
        self.name = name
        self._split = split

    def start(self, case: Case) -> Boundaries:
        """See `Policy.start`."""
        return self._split(case)

    def next_look(self, row: int) -> int:
        """Never within any run."""
        return np.iinfo(np.intp).max

    def look(self, case: Case, row: int, boundaries: Boundaries) -> Proposal | None:
        """Stay."""
        return None

    def moved(self, move: Move) -> None:
        """Never happens."""


class PaperBalancing:
    """DynMo as the paper describes it: measure at a fixed interval and move to what comes out.

    The balancer weighs layers by the time of the iteration before; nobody asks what moving costs
    or whether it pays.

    Args:
        name: of the policy.
        interval: iterations between decisions, chosen by the user.
        split: balancer: (weights with extras, boundaries now) to boundaries.

    Raises:
        ConfigError: an interval below 1.
    """

    def __init__(
        self,
        name: str,
        interval: int,
        split: Callable[[Array, Boundaries], Boundaries],
    ) -> None:
        if interval < 1:
            raise ConfigError(f"an interval of {interval} iterations: at least 1 is needed")
        self.name = name
        self._interval = interval
        self._split = split

    def start(self, case: Case) -> Boundaries:
        """Megatron's default."""
        return case.uniform

    def next_look(self, row: int) -> int:
        """At multiples of the interval, beginning after the first iteration."""
        return 1 if row < 1 else row + self._interval

    def look(self, case: Case, row: int, boundaries: Boundaries) -> Proposal | None:
        """Move whenever the balancer's answer differs."""
        new = self._split(_weights(case, row - 1), boundaries)
        return None if new == boundaries else Proposal(new, f"every {self._interval} iterations")

    def moved(self, move: Move) -> None:
        """Nothing is learned from it."""


def static_policies() -> list[Policy]:
    """Uniform, by parameters, and the best in hindsight; the first one is what "static" means."""

    def uniform(case: Case) -> Boundaries:
        return case.uniform

    def by_parameters(case: Case) -> Boundaries:
        return deepspeed_split(case.trace.parameters, case.pipeline.num_chunks)

    def in_hindsight(case: Case) -> Boundaries:
        return best_static(case, [case.uniform, by_parameters(case)])

    return [
        Static("static", uniform),
        Static("static-parameters", by_parameters),
        Static("best-static", in_hindsight),
    ]


def paper_policies(interval: int, gamma: float = 0.05) -> list[Policy]:
    """The paper's two balancers.

    Args:
        interval: iterations between decisions.
        gamma: imbalance that diffusion tolerates.
    """

    def partition(weights: Array, boundaries: Sequence[int]) -> Boundaries:
        return deepspeed_split(weights, len(boundaries) - 1)

    def diffusion(weights: Array, boundaries: Sequence[int]) -> Boundaries:
        return paper_diffusion(weights, boundaries, gamma=gamma)

    return [
        PaperBalancing("paper-partition", interval, partition),
        PaperBalancing("paper-diffusion", interval, diffusion),
    ]


def _weights(case: Case, row: int) -> Array:
    """[layers] measured time, with the extras counted to the first and the last layer."""
    trace = case.trace
    weights: Array = case.measured(row) * (trace.forward_ms[row] + trace.backward_ms[row])
    extra = trace.extra_forward_ms[row] + trace.extra_backward_ms[row]
    weights[0] += extra[0]
    weights[-1] += extra[1]
    return weights
