"""Flags of packing: going on with fewer pipeline stages, and taking them back."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags import flag, percent, whole
from megatron_dynmo.flags.group import FlagGroup
from megatron_dynmo.flags.pieces import pieces, require_increasing

_FEWEST_STAGES = 2  # with one, the embedding and the output layer would have to be tied anew


def _stages(text: str) -> int:
    """Parse a number of pipeline stages that a run can be packed to."""
    value = whole(text)
    if value < _FEWEST_STAGES:
        raise argparse.ArgumentTypeError(
            f"must be at least {_FEWEST_STAGES}: the first and the last stage stay; got {text}"
        )
    return value


@dataclass(frozen=True)
class ForcedPack:
    """Go on with this many stages after this iteration (tests, experiments).

    Attributes:
        iteration: 1-based count of completed iterations after which it happens.
        num_stages: pipeline stages from then on.
    """

    iteration: int
    num_stages: int


def parse_forced_packs(text: str) -> tuple[ForcedPack, ...]:
    """Parse `ITER:STAGES[;ITER:STAGES...]`.

    Raises:
        ConfigError: A piece is not ITER:STAGES, or iterations do not increase.
    """
    packs: list[ForcedPack] = []
    for piece in pieces(text):
        iteration, colon, stages = (word.strip() for word in piece.partition(":"))
        if not colon or not iteration.isdecimal() or not stages.isdecimal():
            raise ConfigError(
                f"--dynmo-force-pack: '{piece}' is not ITER:STAGES, for example '10:2'"
            )
        packs.append(ForcedPack(int(iteration), int(stages)))
        if packs[-1].iteration < 1 or packs[-1].num_stages < _FEWEST_STAGES:
            raise ConfigError(
                f"--dynmo-force-pack: '{piece}': the first possible iteration is 1, and "
                f"{_FEWEST_STAGES} stages are the fewest"
            )
    require_increasing("--dynmo-force-pack", (pack.iteration for pack in packs))
    return tuple(packs)


def parse_manager(text: str) -> tuple[str, tuple[str, ...]]:
    """Split `none`, `slurm` or `command:PROGRAM WORDS...` into a kind and its argument vector.

    Raises:
        ConfigError: Neither of these, or quotes that do not close.
    """
    kind, colon, rest = text.partition(":")
    if kind == "command":
        try:
            words = tuple(shlex.split(rest))
        except ValueError as error:
            raise ConfigError(f"--dynmo-job-manager '{text}': {error}") from None
        if words:
            return kind, words
    elif kind in ("none", "slurm") and not colon:
        return kind, ()
    raise ConfigError(
        f"--dynmo-job-manager '{text}': give none, slurm, or command:PROGRAM with its arguments"
    )


@dataclass(frozen=True)
class ElasticFlags(FlagGroup):
    """Packing, releasing and taking back."""

    pack: str = flag(
        "advise",
        "fewer stages that train as fast: off: not looked for; advise: said; on: the run goes on "
        "with them, and the others are released",
        choices=["off", "advise", "on"],
    )
    pack_max_slowdown_pct: float = flag(
        2.0,
        "predicted slowdown in percent, against all stages, that packing may cost",
        type=percent,
        metavar="X",
    )
    min_stages: int = flag(
        _FEWEST_STAGES, "fewest pipeline stages to pack to", type=_stages, metavar="N"
    )
    release: str = flag(
        "park",
        "what ranks do that are packed away: park: sleep without memory until they are needed "
        "again; exit: end with status 0; restart: exit too, and when they are needed again save "
        "and end, so that the job manager starts the run anew with all its nodes",
        choices=["park", "exit", "restart"],
    )
    job_manager: str = flag(
        "none",
        "who takes nodes back whose ranks have exited, and starts the run anew: none, slurm, or "
        "command:PROGRAM (gets a JSON document on standard input)",
        metavar="TEXT",
    )
    force_pack: str = flag(
        "",
        "go on with this many stages after an iteration, and never by itself: "
        "ITER:STAGES[;ITER:STAGES...]",
        metavar="TEXT",
    )

    @property
    def forced_packs(self) -> tuple[ForcedPack, ...]:
        """The parsed `--dynmo-force-pack`."""
        return parse_forced_packs(self.force_pack)

    @property
    def packs(self) -> bool:
        """Whether ranks of this run may be released."""
        return self.pack == "on" or bool(self.force_pack)

    @property
    def restarts(self) -> bool:
        """Whether the run ends, to be started anew, when ranks are needed that have exited."""
        return self.release == "restart"

    def check(self) -> None:
        """See `FlagGroup.check`."""
        kind, _ = parse_manager(self.job_manager)
        if kind == "none" and self.restarts:
            raise ConfigError(
                "--dynmo-release restart: somebody has to start the run again; add "
                "--dynmo-job-manager slurm or command:PROGRAM"
            )
        if kind != "none" and self.release == "park":
            raise ConfigError(
                f"--dynmo-job-manager {self.job_manager}: parked ranks keep their nodes, so there "
                "is nothing to give back; add --dynmo-release exit"
            )
        for pack in parse_forced_packs(self.force_pack):
            if pack.num_stages < self.min_stages:
                raise ConfigError(
                    f"--dynmo-force-pack asks for {pack.num_stages} stages after iteration "
                    f"{pack.iteration}, --dynmo-min-stages is {self.min_stages}"
                )
