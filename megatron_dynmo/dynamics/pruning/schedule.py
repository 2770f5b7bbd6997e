"""When how much is pruned: the cubic schedule of gradual pruning.

Tier: pure. Sparsities are exact fractions, so that the last step reaches the final sparsity itself
and every rank counts the same number of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from megatron_dynmo.errors import ConfigError


@dataclass(frozen=True)
class CubicSchedule:
    """s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 for t = t_0, t_0 + dt, ..., t_0 + n dt.

    The steep beginning removes what is redundant, the flat end leaves time to recover. The last
    step is always taken at `end`, also where `every` does not divide the distance; there the
    bracket is 0 and the sparsity is the final one.

    Source: M. Zhu and S. Gupta, To prune, or not to prune, arXiv 1710.01878, equation 1.

    Attributes:
        begin: iteration after which the first step is taken (t_0).
        end: iteration after which the last step is taken (t_0 + n dt).
        every: iterations between two steps (dt).
        final: fraction removed in the end, in (0, 1).
        initial: fraction removed by the first step, in [0, final]; with 0 that step does nothing.
    """

    begin: int
    end: int
    every: int
    final: Fraction
    initial: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        if not 1 <= self.begin <= self.end:
            raise ConfigError(
                f"pruning begins after iteration {self.begin} and ends after {self.end}: "
                "give 1 <= begin <= end"
            )
        if self.every < 1:
            raise ConfigError(f"pruning every {self.every} iterations: give at least 1")
        if not 0 <= self.initial <= self.final < 1 or self.final == 0:
            raise ConfigError(
                f"pruning from {float(self.initial):g} to {float(self.final):g}: give fractions "
                "with 0 <= initial <= final, 0 < final < 1"
            )

    def sparsity(self, iteration: int) -> Fraction:
        """Fraction that is to be removed once an iteration has ended.

        Between two steps it is that of the earlier one; before the first step it is 0.

        Args:
            iteration: 1-based.
        """
        if iteration < self.begin:
            return Fraction(0)
        if iteration >= self.end:
            return self.final
        taken = (iteration - self.begin) // self.every * self.every
        rest = 1 - Fraction(taken, self.end - self.begin)
        return self.final + (self.initial - self.final) * rest**3
