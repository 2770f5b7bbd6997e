"""DynMoConfig and the `--dynmo-*` flags, in Megatron's own kebab-case.

Pure: read before torch or Megatron is imported, because the mode decides whether Megatron is
patched at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags import auto_or_count, count, flag, gigabytes, non_negative, percent
from megatron_dynmo.flags.early_exit import EarlyExitFlags
from megatron_dynmo.flags.elastic import ElasticFlags
from megatron_dynmo.flags.freezing import FreezingFlags
from megatron_dynmo.flags.group import FlagGroup
from megatron_dynmo.flags.mixture_of_depths import MixtureOfDepthsFlags
from megatron_dynmo.flags.moe import MoeFlags
from megatron_dynmo.flags.pieces import pieces, require_increasing
from megatron_dynmo.flags.pruning import PruningFlags
from megatron_dynmo.flags.sparse_attention import SparseAttentionFlags

PREFIX = "--dynmo-"


@dataclass(frozen=True)
class ForcedMove:
    """Move to exactly this layout after this iteration (tests, experiments).

    Attributes:
        iteration: 1-based count of completed iterations after which the move happens.
        layout: Megatron layout string such as `Et*5|t*3L`.
    """

    iteration: int
    layout: str


def parse_forced_moves(text: str) -> tuple[ForcedMove, ...]:
    """Parse `ITER:LAYOUT[;ITER:LAYOUT...]`.

    Raises:
        ConfigError: A piece is not ITER:LAYOUT, or iterations do not increase.
    """
    moves: list[ForcedMove] = []
    for piece in pieces(text):
        iteration, colon, layout = piece.partition(":")
        if not colon or not iteration.strip().isdecimal() or not layout.strip():
            raise ConfigError(
                f"--dynmo-force-layout: '{piece}' is not ITER:LAYOUT, for example '3:Et*5|t*3L'"
            )
        moves.append(ForcedMove(int(iteration), layout.strip()))
    require_increasing("--dynmo-force-layout", (move.iteration for move in moves))
    if moves and moves[0].iteration < 1:
        raise ConfigError("--dynmo-force-layout: the first possible iteration is 1, got 0")
    return tuple(moves)


class _OneLineParser(argparse.ArgumentParser):
    """An argument parser whose mistakes are ConfigErrors instead of a process exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclass(frozen=True)
class DynMoConfig(
    FreezingFlags,
    PruningFlags,
    EarlyExitFlags,
    MixtureOfDepthsFlags,
    MoeFlags,
    SparseAttentionFlags,
    ElasticFlags,
):
    """All settings of megatron_dynmo; the defaults need no thought.

    The bases are the groups of flags of single features, dynamics in the order in which they act on
    a layer. Every field is one `--dynmo-*` flag: `min_gain_pct` is `--dynmo-min-gain-pct`.
    """

    mode: str = flag(
        "balance",
        "off: Megatron unpatched; observe: measure and advise; balance: move layers",
        choices=["off", "observe", "balance"],
    )
    device: str = flag(
        "auto",
        "auto: CPU over gloo where CUDA is absent; cuda: refuse to run without; cpu: run on CPU",
        choices=["auto", "cuda", "cpu"],
    )
    balancer: str = flag(
        "partition",
        "partition: exact min-max split; diffusion: neighbours hand over boundary layers",
        choices=["partition", "diffusion"],
    )
    weight: str = flag(
        "time", "what a layer weighs in a split", choices=["time", "params", "memory"]
    )
    interval: int | None = flag(
        None,
        "decide every N iterations instead of when the trigger says so (default: auto)",
        type=auto_or_count,
        metavar="N",
    )
    window: int = flag(3, "iterations measured per decision", type=count, metavar="N")
    cooldown: int | None = flag(
        None, "iterations to wait after a move (default: auto)", type=auto_or_count, metavar="N"
    )
    min_gain_pct: float = flag(
        2.0, "predicted gain in percent below which nothing moves", type=percent, metavar="X"
    )
    memory_cap_gb: float | None = flag(
        None,
        "limit of parameters, optimizer state and activations per stage, in GB of 1e9 bytes "
        "(default: the device's memory)",
        type=gigabytes,
        metavar="X",
    )
    force_layout: str = flag(
        "",
        "move to exactly this layout after an iteration, and never by itself: "
        "ITER:LAYOUT[;ITER:LAYOUT...]",
        metavar="TEXT",
    )
    overlap_moves: bool = flag(
        False,
        "move layers as the next iteration begins, and let their optimizer state follow while it "
        "computes (over gloo)",
    )
    log_dir: str | None = flag(None, "folder for events.jsonl", metavar="DIR")
    digest_interval: int = flag(
        0,
        "write a layout-independent digest of parameters and optimizer state every N iterations",
        type=non_negative,
        metavar="N",
    )
    layer_rng: bool = flag(
        False,
        "dropout streams by layer, micro-batch and iteration, so that dropout does not depend on "
        "the layout",
    )
    emulate: str | None = flag(
        None,
        "tests and benchmarks only: run on emulated devices, whose virtual time this file "
        "describes (docs/emulation.md)",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        parse_forced_moves(self.force_layout)
        if self.force_layout and self.mode != "balance":
            raise ConfigError(
                f"--dynmo-force-layout moves layers, which --dynmo-mode {self.mode} does not; "
                "use --dynmo-mode balance"
            )
        if self.overlap_moves and (self.mode != "balance" or self.emulate is not None):
            raise ConfigError(
                "--dynmo-overlap-moves has no effect "
                + (
                    f"with --dynmo-mode {self.mode}, which moves nothing"
                    if self.mode != "balance"
                    else "on emulated devices, whose time knows no overlap"
                )
                + "; leave it out"
            )
        if self.packs and self.mode != "balance":
            raise ConfigError(
                f"packing moves layers, which --dynmo-mode {self.mode} does not; "
                "use --dynmo-mode balance, or --dynmo-pack advise"
            )
        for group in FLAG_GROUPS:
            group.check(self)
            self._refuse_idle(group)
        if self.dynamics and self.mode == "off":
            raise ConfigError(
                f"--dynmo-mode off leaves Megatron unpatched, so there is no "
                f"{' and no '.join(self.dynamics)}; use --dynmo-mode observe to train with it "
                "without moving layers"
            )
        if self.log_dir is not None and Path(self.log_dir).is_file():
            raise ConfigError(f"--dynmo-log-dir {self.log_dir} is a file, give a folder")
        if self.emulate is not None:
            if self.mode == "off":
                raise ConfigError("--dynmo-emulate needs --dynmo-mode observe or balance")
            from megatron_dynmo.emulate.emulation_file import read_emulation  # needs numpy

            read_emulation(self.emulate)  # a wrong file is a mistake in a flag

    def _refuse_idle(self, group: type[FlagGroup]) -> None:
        """Refuse settings of a dynamic, or of a variant of it, that is off.

        A run without it is not what was meant.
        """
        if group.kind is None:
            return
        switch, *settings = dataclasses.fields(group)  # type: ignore[arg-type]
        given = [item for item in settings if getattr(self, item.name) != item.default]
        if given and not group.is_on(self):
            names = " and ".join(_flag_name(item) for item in given)
            raise ConfigError(
                f"{names}: no effect without {_flag_name(switch)}; add it, or leave the rest out"
            )
        variant = getattr(self, switch.name)
        for item in given:
            only_with = item.metadata["only_with"]
            if only_with and variant not in only_with:
                raise ConfigError(
                    f"{_flag_name(item)}: no effect with {_flag_name(switch)} {variant}, only with "
                    f"{' or '.join(only_with)}; leave it out"
                )

    @property
    def dynamics(self) -> tuple[str, ...]:
        """The kinds of dynamics that are on, in their fixed order."""
        return tuple(g.kind for g in FLAG_GROUPS if g.kind is not None and g.is_on(self))

    @property
    def follows_layers(self) -> bool:
        """Whether gradients are reduced, and optimizer state is cut, layer by layer.

        With dynamics there is no stock run to be equal to, but a run that never moves must equal
        one that does.
        """
        return self.mode == "balance" or bool(self.dynamics)

    @property
    def forced_moves(self) -> tuple[ForcedMove, ...]:
        """The parsed `--dynmo-force-layout`."""
        return parse_forced_moves(self.force_layout)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the `dynmo` argument group; usable as Megatron's extra_args_provider."""
        group = parser.add_argument_group(
            "dynmo", "dynamic load balancing: moves layers between pipeline stages while training"
        )
        # The flags of every run before those of single features.
        of_groups = {
            item.name
            for kind in FLAG_GROUPS
            for item in dataclasses.fields(kind)  # type: ignore[arg-type]
        }
        items = dataclasses.fields(DynMoConfig)
        for item in sorted(items, key=lambda item: item.name in of_groups):
            options = dict(item.metadata["argparse"])
            if item.type == "bool":
                options["action"] = "store_true"
            group.add_argument(
                PREFIX + item.name.replace("_", "-"),
                dest="dynmo_" + item.name,
                default=item.default,
                help=_help(item),
                **options,
            )
        return parser

    @classmethod
    def from_namespace(cls, args: argparse.Namespace) -> DynMoConfig:
        """Read the `dynmo_*` attributes of parsed arguments."""
        return cls(
            **{item.name: getattr(args, "dynmo_" + item.name) for item in dataclasses.fields(cls)}
        )

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> DynMoConfig:
        """Read the `--dynmo-*` flags of a command line and ignore all others.

        The flags may stand anywhere; of two equal ones the last wins.

        Raises:
            ConfigError: Unknown `--dynmo-*` flag (with a suggestion), or a bad value.
        """
        parser = _OneLineParser(add_help=False, allow_abbrev=False, prog="dynmo")
        cls.add_arguments(parser)
        known, rest = parser.parse_known_args(list(argv))
        for text in rest:
            if text == "--dynmo" or text.startswith(PREFIX):
                raise ConfigError(unknown_flag_message(text.partition("=")[0]))
        return cls.from_namespace(known)


def _flag_name(item: dataclasses.Field[Any]) -> str:
    return PREFIX + item.name.replace("_", "-")


def _help(item: dataclasses.Field[Any]) -> str:
    """The help of a flag with its default, where it has one that is not said already."""
    text: str = item.metadata["help"]
    if item.type == "bool" or item.default in (None, "") or "(default" in text:
        return text
    return f"{text} (default: {item.default})"


FLAG_GROUPS: tuple[type[FlagGroup], ...] = DynMoConfig.__bases__
"""The groups of flags, in the order of the bases."""


def flag_names() -> tuple[str, ...]:
    """All `--dynmo-*` flags in the order of the config's fields."""
    return tuple(PREFIX + f.name.replace("_", "-") for f in dataclasses.fields(DynMoConfig))


def unknown_flag_message(flag: str) -> str:
    """One line about an unknown flag, with the nearest real one when there is one."""
    near = difflib.get_close_matches(flag, flag_names(), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "known: " + " ".join(flag_names())
    return f"unknown flag {flag}; {hint}"
