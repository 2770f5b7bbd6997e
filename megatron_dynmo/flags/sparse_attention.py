"""Flags of dynamic sparse attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags import count, flag, positive_fraction
from megatron_dynmo.flags.bucket_schedule import DEFAULT_BUCKETS, BucketSchedule
from megatron_dynmo.flags.group import FlagGroup


@dataclass(frozen=True)
class SparseAttentionFlags(FlagGroup):
    """Which tokens attend to each other, and how that changes by layer and iteration."""

    kind: ClassVar[str | None] = "sparse_attention"

    sparse_attention: str = flag(
        "none",
        "hash: a token attends to itself and to earlier tokens that are hashed into its bucket, "
        "and only blocks of scores that hold such pairs are computed",
        choices=["none", "hash"],
    )
    sparse_attention_buckets: str = flag(
        DEFAULT_BUCKETS,
        "buckets of a head: N, or N after ITER iterations, of all layers or of some: "
        "ITER:N[@LAYERS][;ITER:N[@LAYERS]...], as '0:1;100:4;200:8@1-6,9'; 1 is dense attention",
        metavar="TEXT",
    )
    sparse_attention_rounds: int = flag(
        1,
        "independent hashes; tokens attend to each other where one of them agrees",
        type=count,
        metavar="N",
    )
    sparse_attention_codes: str = flag(
        "separate",
        "separate: a token's query and key are hashed each for itself; shared: by its key alone, "
        "so that both are in the same bucket",
        choices=["separate", "shared"],
    )
    sparse_attention_density: float | None = flag(
        None,
        "follow the content: every few iterations, choose each layer's buckets so that it computes "
        "this share of the scores of causal attention",
        type=positive_fraction,
        metavar="X",
    )

    def is_on(self) -> bool:
        """Whether attention is sparse."""
        return self.sparse_attention != "none"

    def check(self) -> None:
        """Refuse a wrong schedule, and a schedule beside a density to follow."""
        schedule = BucketSchedule.parse(self.sparse_attention_buckets)
        if self.sparse_attention_density is not None and schedule.changes:
            raise ConfigError(
                f"--dynmo-sparse-attention-density {self.sparse_attention_density} chooses the "
                "buckets by content, so --dynmo-sparse-attention-buckets can only say where to "
                f"begin, but '{self.sparse_attention_buckets}' changes them; leave one of the two"
            )

    @property
    def bucket_schedule(self) -> BucketSchedule:
        """The parsed `--dynmo-sparse-attention-buckets`."""
        return BucketSchedule.parse(self.sparse_attention_buckets)
