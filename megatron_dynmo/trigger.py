"""When to move: a pure decision from measured windows, the same on every rank.

Tier: pure. It sees numbers only; who measures them and who moves layers is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dynmo.layout import LayerLayout


@dataclass(frozen=True)
class Decision:
    """What to do now and why, in one line.

    Attributes:
        action: `move`, `stay` or `rollback`.
        reason: one line for a person, also for staying.
        old: layout in force.
        new: layout to reach; equal to `old` when staying.
        predicted_iteration_ms: iteration time expected under `new`; None when unknown.
        gain_pct: predicted gain over the present in percent; None when unknown.
        migration_cost_ms: expected wall time of the move; None when unknown.
    """

    action: str
    reason: str
    old: LayerLayout
    new: LayerLayout
    predicted_iteration_ms: float | None = None
    gain_pct: float | None = None
    migration_cost_ms: float | None = None

    @property
    def is_move(self) -> bool:
        """Whether layers are to change place."""
        return self.new != self.old
