"""`--dynmo-freeze...`: layers that are trained no more, from the front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags import count, flag, fraction, non_negative
from megatron_dynmo.flags.group import FlagGroup
from megatron_dynmo.flags.pieces import pieces, require_increasing


def parse_freeze_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `ITER:LAST_LAYER[;ITER:LAST_LAYER...]`.

    Returns:
        (iteration, last layer that is frozen after it), iterations increasing; 0 freezes none.

    Raises:
        ConfigError: A piece is not ITER:LAST_LAYER, or iterations do not increase.
    """
    found: list[tuple[int, int]] = []
    for piece in pieces(text):
        iteration, colon, last = (part.strip() for part in piece.partition(":"))
        if not colon or not iteration.isdecimal() or not last.isdecimal() or int(iteration) < 1:
            raise ConfigError(
                f"--dynmo-freeze-schedule: '{piece}' is not ITER:LAST_LAYER, for example '100:4': "
                "layers 1 to 4 are frozen after iteration 100"
            )
        found.append((int(iteration), int(last)))
    require_increasing("--dynmo-freeze-schedule", (iteration for iteration, _ in found))
    return tuple(found)


@dataclass(frozen=True)
class FreezingFlags(FlagGroup):
    """Which layers are frozen, and when."""

    kind: ClassVar[str | None] = "freezing"

    freeze: str | None = flag(
        None,
        "freeze layers from the front. schedule: as --dynmo-freeze-schedule says; autofreeze: when "
        "a layer's gradient norm changes less than those of the others; egeria: when a layer's "
        "weights have come to move at a steady pace, and thaw all when the learning rate drops",
        choices=["schedule", "autofreeze", "egeria"],
    )
    freeze_schedule: str = flag(
        "",
        "layers 1 to LAST_LAYER are frozen after an iteration, none with 0: "
        "ITER:LAST_LAYER[;ITER:LAST_LAYER...]",
        metavar="TEXT",
        only_with=("schedule",),
    )
    freeze_embedding: str = flag(
        "auto",
        "auto: the embedding is frozen together with layer 1, unless the output layer shares its "
        "weights; never: it is always trained",
        choices=["auto", "never"],
    )
    freeze_interval: int = flag(
        100,
        "autofreeze and egeria: iterations from one evaluation to the next",
        type=count,
        metavar="N",
        only_with=("autofreeze", "egeria"),
    )
    freeze_keep: int = flag(
        1,
        "autofreeze and egeria: how many of the last layers stay",
        type=non_negative,
        metavar="N",
        only_with=("autofreeze", "egeria"),
    )
    freeze_percentile: float = flag(
        0.5,
        "autofreeze: a layer is ripe when its gradient norm changes less than in this share of the "
        "layers that are trained",
        type=fraction,
        metavar="X",
        only_with=("autofreeze",),
    )
    freeze_window: int = flag(
        3,
        "egeria: evaluations over which a slope is fitted",
        type=count,
        metavar="N",
        only_with=("egeria",),
    )
    freeze_tolerance: float = flag(
        0.2,
        "egeria: a layer is ripe when its plasticity changes by at most this share per evaluation",
        type=fraction,
        metavar="X",
        only_with=("egeria",),
    )
    freeze_thaw_ratio: float = flag(
        0.1,
        "egeria: all layers are thawed when the learning rate has fallen to this share of what it "
        "was at the last freeze; 0 never",
        type=fraction,
        metavar="X",
        only_with=("egeria",),
    )

    def is_on(self) -> bool:
        """Whether layers are frozen."""
        return self.freeze is not None

    def check(self) -> None:
        """Refuse a schedule that is missing, wrong or has no effect.

        Raises:
            ConfigError: Names the flags and what to change.
        """
        schedule = parse_freeze_schedule(self.freeze_schedule)
        if self.freeze == "schedule" and not schedule:
            raise ConfigError(
                "--dynmo-freeze schedule needs --dynmo-freeze-schedule, for example '100:4'"
            )
        if self.freeze == "egeria" and self.freeze_window < 2:
            raise ConfigError(
                f"--dynmo-freeze-window {self.freeze_window}: a slope needs 2 evaluations or more"
            )

    @property
    def thaws(self) -> bool:
        """Whether layers may be trained again after they were frozen."""
        if self.freeze == "schedule":
            lasts = [last for _, last in parse_freeze_schedule(self.freeze_schedule)]
            return lasts != sorted(lasts)
        return self.freeze == "egeria" and self.freeze_thaw_ratio > 0
