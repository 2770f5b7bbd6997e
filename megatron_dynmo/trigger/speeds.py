"""Which ranks are slow: told from costs that follow the rank instead of the layer.

Model: a layer's time on a rank is its base cost times the rank's slowness (1 = healthy), for the
forward and the backward alike. Two observations, and only these, are put down to a rank:

1. A layer that moved changed its time, by the same factor forward and backward, while no layer
   that stayed changed like that. This settles every doubt, in both directions.
2. At one time all layers of a single rank (two or more) became slower by one factor, forward and
   backward. Where several did, it is far likelier the layers': dynamics change runs of layers,
   which do not end where stages do, while ranks fail one by one. The reverse counts only for a rank
   already thought slow, where one layer is enough, for that may be all it has left: a stage that
   gets faster by itself is a stage of pruned, frozen or left-out layers. A rank that a move has
   cleared of such a suspicion is not suspected on this ground again.

Ranks that differ from the very start are not told from layers that differ: early exit at a stage's
edge looks just like a slow rank before it. Costs then follow the layers, and the first move brings
observation 1. Tier: pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger.history import Array, median, owners

__all__ = ["RankSpeeds", "time_on_old_owner"]

_LEAST_CHANGE = 0.1  # a rank must differ by 10 %; less may be cache or memory placement
_SHARE_AGREEING = 0.8  # of a rank's passes; one outlier among five does not hide a slow rank
_TINY_MS = 1e-9
_MAX_REFERENCE_AGE = 8  # windows; a slow drift is the layers'


class RankSpeeds:
    """Slowness of every rank, learned as the module says.

    Args:
        num_stages: pipeline ranks.

    Attributes:
        slowness: [num_stages], at least 1; 2 takes twice as long.
    """

    def __init__(self, num_stages: int) -> None:
        self.slowness: Array = np.ones(num_stages)
        self._cleared: set[int] = set()
        self._reference: Array | None = None
        self._age = 0

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speed of every pp_rank; exactly 1.0 for a healthy one."""
        return tuple((1.0 / self.slowness).tolist())

    @property
    def all_healthy(self) -> bool:
        """Whether no rank is thought slow."""
        return bool((self.slowness == 1.0).all())

    def describe(self) -> str:
        """Name the slow ranks; empty when there are none."""
        slow = [
            f"rank {rank} {value:.2f}x slow"
            for rank, value in enumerate(self.slowness.tolist())
            if value > 1
        ]
        return ", ".join(slow)

    def layer_factors(self, layout: LayerLayout, measured_on: LayerLayout) -> Array:
        """[num_layers + 2], what turns times measured under one layout into those of another.

        Extras stay where they are, so theirs is 1.
        """
        factors = np.ones(layout.num_layers + 2)
        if not self.all_healthy:
            factors[:-2] = self.slowness[owners(layout)] / self.slowness[owners(measured_on)]
        return factors

    def base_factors(self, layout: LayerLayout) -> Array:
        """[num_layers + 2], what turns measured times into those of a healthy rank."""
        factors = np.ones(layout.num_layers + 2)
        if not self.all_healthy:
            factors[:-2] = 1.0 / self.slowness[owners(layout)]
            factors[-2:] = 1.0 / self.slowness[0], 1.0 / self.slowness[-1]
        return factors

    def forget_reference(self) -> None:
        """Layers are announced to change: compare with what is measured next."""
        self._reference = None

    def layers_moved(self) -> None:
        """Compare with what is measured next, unless a recovery has to be watched for."""
        if self.all_healthy:
            self._reference = None

    def sees_change(self, times: Array, layout: LayerLayout) -> bool:
        """Whether any layer changed enough to be worth `see_window`.

        Args:
            times: [2, num_layers + 2], central times of a window.
            layout: under which they were measured.
        """
        if self._reference is None:
            self._refer_to(times, layout)
        ratios = self._changes(times, layout)[:, :-2]
        least = 1.0 + _LEAST_CHANGE
        is_seen = bool(((ratios > least) | (ratios < 1 / least)).any())
        self._age += 1
        if not is_seen and self._age > _MAX_REFERENCE_AGE and self.all_healthy:
            self._refer_to(times, layout)
        return is_seen

    def _refer_to(self, times: Array, layout: LayerLayout) -> None:
        """Keep these times, as they would be on healthy ranks, to compare with."""
        self._reference, self._age = times * self.base_factors(layout), 0

    def _changes(self, times: Array, layout: LayerLayout) -> Array:
        """[2, num_layers + 2], times over the reference's, and over what its rank makes of them."""
        assert self._reference is not None
        return _ratios(times * self.base_factors(layout), self._reference)

    def see_window(self, times: Array, layout: LayerLayout, tolerance: float) -> bool:
        """Look for ranks whose layers all changed at once; return whether one was found.

        Args:
            times: [2, num_layers + 2], as `sees_change` got them just before.
            layout: under which they were measured.
            tolerance: relative change that noise may cause.
        """
        changes = self._changes(times, layout)
        ratios = changes[:, :-2]
        least = 1.0 + max(tolerance, _LEAST_CHANGE)
        rank_of_layer = owners(layout)
        per_rank = [ratios[:, rank_of_layer == rank] for rank in range(layout.num_stages)]
        medians = np.array([_median(r) for r in per_rank])
        excess = medians / _common(medians)
        of_a_rank = [_is_uniform(r, tolerance) for r in per_rank]
        slower = [rank for rank in range(layout.num_stages) if excess[rank] > least]
        found = False
        for rank in range(layout.num_stages):
            got_slow = slower == [rank]
            got_slow = got_slow and rank not in self._cleared
            got_slow = got_slow and _edge_followed(changes, rank, medians)
            recovers = self.slowness[rank] > 1 and excess[rank] < 1 / least
            got_slow = got_slow and per_rank[rank].shape[1] >= 2
            if of_a_rank[rank] and (got_slow or recovers):
                self.slowness[rank] = _settle(self.slowness[rank] * excess[rank])
                found = True
        if found or (self._age > _MAX_REFERENCE_AGE and self.all_healthy):
            self._refer_to(times, layout)
        return found

    def see_move(
        self, before: Array, after: Array, old: LayerLayout, new: LayerLayout, tolerance: float
    ) -> None:
        """Compare moved layers with themselves on their old rank.

        Args:
            before: [2, num_layers + 2], times under the old layout, announced changes applied.
            after: the same under the new layout.
            old: layout before.
            new: layout after.
            tolerance: relative change that noise may cause.
        """
        from_rank, to_rank = owners(old), owners(new)
        moved = from_rank != to_rank
        ratios = _ratios(after[:, :-2], before[:, :-2])
        surplus = _surplus(ratios, moved, tolerance)
        slowness = self.slowness.copy()
        pairs = zip(from_rank[moved].tolist(), to_rank[moved].tolist(), strict=True)
        for src, dst in sorted(set(pairs)):
            pair = surplus[:, moved & (from_rank == src) & (to_rank == dst)]
            factor = _median(pair)
            differs = abs(factor - 1.0) > max(tolerance, _LEAST_CHANGE)
            believed = slowness[src] != slowness[dst]
            if (differs or believed) and _agrees(pair, factor, tolerance):
                _set_difference(slowness, src, dst, factor if differs else 1.0)
        slowness = np.array([_settle(s) for s in (slowness / slowness.min()).tolist()])
        cleared = (self.slowness > 1) & (slowness == 1)
        self._cleared.update(np.flatnonzero(cleared).tolist())
        if (slowness != self.slowness).any():
            self._reference = None
        self.slowness = slowness

    def state(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        reference = None if self._reference is None else self._reference.tolist()
        return {
            "slowness": self.slowness.tolist(),
            "cleared": sorted(self._cleared),
            "reference": reference,
            "age": self._age,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.slowness = np.array(state["slowness"])
        self._cleared = set(state["cleared"])
        reference = state["reference"]
        self._reference = None if reference is None else np.array(reference)
        self._age = state["age"]


def time_on_old_owner(
    before: Array,
    after: Array,
    moved: NDArray[np.bool_],
    rank_factors: Array,
    tolerance: float,
) -> Array:
    """[2, num_layers + 2], what the layers would take now had they not moved.

    A moved layer's change is believed to be its own if layers that stayed changed as much;
    whatever else it gained or lost came from its new rank and would not be there.

    Args:
        before: [2, num_layers + 2], times under the old layout, announced changes applied.
        after: the same under the new layout.
        moved: [num_layers].
        rank_factors: [num_layers], what the slowness of the ranks alone makes of the move.
        tolerance: relative change that noise may cause.
    """
    times = after.copy()
    times[:, :-2] /= rank_factors
    ratios = _ratios(times[:, :-2], before[:, :-2])
    common = _common(ratios[:, ~moved]) if (~moved).any() else 1.0
    strange = moved & (_surplus(ratios, moved, tolerance) != 1.0).any(axis=0)
    times[:, :-2] = np.where(strange, before[:, :-2] * common, times[:, :-2])
    return times


# -------------------------------------------------------------------- ratios of times


def _ratios(now: Array, then: Array) -> Array:
    """Now / then; NaN where a pass takes no time, such as the backward of a frozen layer."""
    timed = (now > _TINY_MS) & (then > _TINY_MS)
    return np.divide(now, then, out=np.full(now.shape, np.nan), where=timed)


def _median(values: Array) -> float:
    """Median of what is timed; 1 when nothing is."""
    timed = values[~np.isnan(values)]
    return float(median(timed)) if timed.size else 1.0


def _common(values: Array) -> float:
    """The middle change; of two middle ones the smaller, so that one of two ranks can be slow."""
    timed = np.sort(values[~np.isnan(values)])
    if not timed.size:
        return 1.0
    low, high = float(timed[(timed.size - 1) // 2]), float(timed[timed.size // 2])
    return low if max(low, 1 / low) <= max(high, 1 / high) else high


def _surplus(ratios: Array, moved: NDArray[np.bool_], tolerance: float) -> Array:
    """Change of moved layers beyond any that layers which stayed show; 1 where there is none."""
    stayed = ratios[:, ~moved]
    stayed = stayed[~np.isnan(stayed)]
    low, high = (min(1.0, stayed.min()), max(1.0, stayed.max())) if stayed.size else (1.0, 1.0)
    common = _common(stayed) if stayed.size else 1.0
    seen = (ratios >= low / (1 + tolerance)) & (ratios <= high * (1 + tolerance))
    return np.where(seen & ~np.isnan(ratios), 1.0, ratios / common)


def _agrees(ratios: Array, factor: float, tolerance: float) -> bool:
    """Whether nearly all passes changed by this factor."""
    timed = ratios[~np.isnan(ratios)]
    near = (timed <= factor * (1 + tolerance)) & (timed >= factor / (1 + tolerance))
    return bool(near.sum() >= _SHARE_AGREEING * timed.size) and timed.size > 0


def _is_uniform(ratios: Array, tolerance: float) -> bool:
    """Whether forward and backward of all layers changed by one factor."""
    forward, backward = _median(ratios[0]), _median(ratios[1])
    return _agrees(ratios, _median(ratios), tolerance) and max(forward, backward) <= min(
        forward, backward
    ) * (1 + tolerance)


def _edge_followed(changes: Array, rank: int, medians: Array) -> bool:
    """Whether the embedding or the output layer of this rank, if it has any, became slower too."""
    edges = [col for col, owner in ((-2, 0), (-1, len(medians) - 1)) if owner == rank]
    half_way = 1.0 + (medians[rank] - 1.0) / 2
    return all(
        np.isnan(changes[:, col]).all() or _median(changes[:, col]) >= half_way for col in edges
    )


def _settle(slowness: float) -> float:
    """Take a rank that is nearly healthy for healthy, so that costs stay as measured."""
    return slowness if slowness > 1 + _LEAST_CHANGE else 1.0


def _set_difference(slowness: Array, src: int, dst: int, factor: float) -> None:
    """Make dst this many times as slow as src by changing the one that leaves both healthiest."""
    new_dst, new_src = slowness[src] * factor, slowness[dst] / factor
    if new_dst >= 1 and (new_src < 1 or slowness[src] + new_dst <= new_src + slowness[dst]):
        slowness[dst] = new_dst
    else:
        slowness[src] = new_src
