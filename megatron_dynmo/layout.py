"""Which pipeline stage owns which transformer layers, in Megatron's own layout language.

A layout is a list of model chunks in virtual-pipeline-major order: for vp_stage, for pp_rank. Each
chunk owns a contiguous run of decoder layers; the embedding always sits in the first chunk and the
loss in the last one, because that is where Megatron builds them.

Grammar and rules:
Source: megatron/core/transformer/pipeline_parallel_layer_layout.py@core_v0.19.2
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from megatron_dynmo.errors import LayoutError
from megatron_dynmo.layout_text import check_letters, expand, repeat

__all__ = ["LayerLayout"]

_MIN_CHUNKS_TO_FOLD = 4  # shorter runs of equal chunks read better written out


@dataclass(frozen=True)
class LayerLayout:
    """An assignment of contiguous layers to (pp_rank, vp_stage); immutable and hashable.

    Two layouts are equal exactly when every chunk owns the same layers, whatever text they came
    from. Layer numbers are 1-based, as Megatron's `layer_number`.

    Attributes:
        chunk_boundaries: cumulative layer counts, num_stages * virtual_stages + 1 values; chunk i
            (vp-major) owns layers chunk_boundaries[i] + 1 .. chunk_boundaries[i + 1].
        num_stages: pipeline-parallel size.
        mtp_num_layers: multi-token-prediction layers, not counted among the decoder layers.
        mtp_chunk: vp-major index of the chunk that holds all of them; None when there are none.

    Raises:
        LayoutError: the boundaries are not a legal layout; the text names the numbers.
    """

    chunk_boundaries: tuple[int, ...]
    num_stages: int
    mtp_num_layers: int = 0
    mtp_chunk: int | None = None

    def __post_init__(self) -> None:
        _check_boundaries(self.chunk_boundaries, self.num_stages)
        if self.mtp_num_layers == 0:
            object.__setattr__(self, "mtp_chunk", None)
        elif self.mtp_chunk is None:
            object.__setattr__(self, "mtp_chunk", self.num_chunks - 1)
        _check_mtp(self)

    # ---------------------------------------------------------------- constructors

    @classmethod
    def from_megatron(cls, text: str, *, num_layers: int, num_stages: int) -> LayerLayout:
        """Parse Megatron's layout text, for example `Et*5|tttL` or `Et|(tt|)*29tt|L`.

        E is the embedding, t a transformer layer, m an MTP layer, L the loss, | ends a chunk, x*n
        repeats a letter, (..)*n repeats a group, commas are ignored and an empty chunk is legal.
        The number of virtual stages follows from the number of chunks. E must come first and L
        last of all letters; empty chunks around them are accepted as Megatron accepts them, and
        `to_megatron` then shows where Megatron really builds them: the first and the last chunk.

        Args:
            text: the layout.
            num_layers: decoder layers of the model, without MTP.
            num_stages: pipeline-parallel size.

        Raises:
            LayoutError: naming the unknown letter, or the count found and the count wanted.
        """
        chunks = expand(text).split("|")
        check_letters(chunks, text)
        num_found = sum(chunk.count("t") for chunk in chunks)
        if num_found != num_layers:
            raise LayoutError(
                f"{num_found} of {num_layers} layers: the layout {text!r} has {num_found} t in "
                f"{len(chunks)} chunks, the model has {num_layers} decoder layers; "
                f"{_add_or_remove(num_layers - num_found, 't')}"
            )
        if num_stages < 1 or len(chunks) % num_stages:
            raise LayoutError(
                f"{len(chunks)} chunks on {num_stages} pipeline stages: the layout {text!r} must "
                "have a multiple of the pipeline size, one chunk for every pp_rank and vp_stage; "
                f"{_nearest_multiple_advice(len(chunks), num_stages)}"
            )
        mtp_chunks = [i for i, chunk in enumerate(chunks) if "m" in chunk]
        if len(mtp_chunks) > 1 or "mt" in "".join(chunks):
            raise LayoutError(
                f"the layout {text!r} must keep all m together in one chunk, after every t"
            )
        return cls(
            chunk_boundaries=(0, *accumulate(chunk.count("t") for chunk in chunks)),
            num_stages=num_stages,
            mtp_num_layers=sum(chunk.count("m") for chunk in chunks),
            mtp_chunk=mtp_chunks[0] if mtp_chunks else None,
        )

    @classmethod
    def from_boundaries(
        cls,
        boundaries: Sequence[int],
        *,
        num_stages: int,
        virtual_stages: int = 1,
        mtp_num_layers: int = 0,
        mtp_chunk: int | None = None,
    ) -> LayerLayout:
        """Make a layout from cumulative layer counts, as `partition` returns them.

        Args:
            boundaries: num_stages * virtual_stages + 1 counts in vp-major chunk order, from 0 to
                the number of layers.
            num_stages: pipeline-parallel size.
            virtual_stages: chunks on each rank.
            mtp_num_layers: MTP layers.
            mtp_chunk: vp-major index of the chunk that holds them; the last one by default.

        Raises:
            LayoutError: wrong number of boundaries, or boundaries that run backwards.
        """
        wanted = num_stages * virtual_stages + 1
        if len(boundaries) != wanted:
            raise LayoutError(
                f"{len(boundaries)} boundaries, {wanted} wanted: {num_stages} stages with "
                f"{virtual_stages} chunks each need one more boundary than chunks"
            )
        return cls(tuple(int(b) for b in boundaries), num_stages, mtp_num_layers, mtp_chunk)

    @classmethod
    def even(
        cls, num_layers: int, num_stages: int, *, virtual_stages: int = 1, mtp_num_layers: int = 0
    ) -> LayerLayout:
        """Reproduce Megatron's default split: the same number of layers in every chunk.

        Raises:
            LayoutError: the layers do not divide evenly, which Megatron refuses too; the text
                offers the nearest layout that works.
        """
        num_chunks = num_stages * virtual_stages
        if num_layers % num_chunks:
            offer = cls.nearly_even(
                num_layers, num_stages, virtual_stages=virtual_stages, mtp_num_layers=mtp_num_layers
            )
            raise LayoutError(
                f"{num_layers} layers do not divide into {num_chunks} equal chunks ({num_stages} "
                f"stages x {virtual_stages}); use --pipeline-model-parallel-layout "
                f"'{offer.to_megatron()}'"
            )
        return cls.nearly_even(
            num_layers, num_stages, virtual_stages=virtual_stages, mtp_num_layers=mtp_num_layers
        )

    @classmethod
    def nearly_even(
        cls, num_layers: int, num_stages: int, *, virtual_stages: int = 1, mtp_num_layers: int = 0
    ) -> LayerLayout:
        """Split any number of layers so that chunks, and ranks, differ by one layer at most.

        The earliest chunks take what is left over: in vp-major order that spreads it over the
        ranks, and the last stage, which also computes the loss, gets none of it before the others.

        Raises:
            LayoutError: fewer than one stage or virtual stage, or a negative number of layers.
        """
        if min(num_stages, virtual_stages) < 1:
            raise LayoutError(
                f"{num_stages} stages x {virtual_stages} virtual stages: both must be at least 1"
            )
        share, left_over = divmod(num_layers, num_stages * virtual_stages)
        sizes = [share + (i < left_over) for i in range(num_stages * virtual_stages)]
        return cls((0, *accumulate(sizes)), num_stages, mtp_num_layers)

    @classmethod
    def first_last(
        cls,
        num_layers: int,
        num_stages: int,
        *,
        first_num_layers: int | None = None,
        last_num_layers: int | None = None,
        virtual_stages: int = 1,
    ) -> LayerLayout:
        """Reproduce Megatron's split with a fixed number of layers on the first or last pp_rank.

        Args:
            num_layers: decoder layers.
            num_stages: pipeline-parallel size.
            first_num_layers: layers of pp_rank 0 over all its chunks; None for an equal share.
            last_num_layers: layers of the last pp_rank; None for an equal share.
            virtual_stages: chunks on each rank.

        Raises:
            LayoutError: the layers left over do not divide over the stages left over.
        """
        asked = {0: first_num_layers, num_stages - 1: last_num_layers}
        fixed = {rank: count for rank, count in asked.items() if count is not None}
        left, ranks_left = num_layers - sum(fixed.values()), num_stages - len(fixed)
        works = left >= 0 and (left % ranks_left == 0 if ranks_left else left == 0)
        shares = [fixed.get(r, left // max(ranks_left, 1)) for r in range(num_stages)]
        if not works or any(share % virtual_stages for share in shares):
            offer = cls.nearly_even(num_layers, num_stages, virtual_stages=virtual_stages)
            raise LayoutError(
                f"first and last stage take {sum(fixed.values())} of {num_layers} layers, "
                f"{left} are left for {ranks_left} stages in chunks of equal size "
                f"({virtual_stages} a rank); use --pipeline-model-parallel-layout "
                f"'{offer.to_megatron()}', say, instead of the first and last counts"
            )
        sizes = [share // virtual_stages for share in shares] * virtual_stages
        return cls((0, *accumulate(sizes)), num_stages)

    # ---------------------------------------------------------------- what it says

    @property
    def boundaries(self) -> list[int]:
        """Cumulative layer counts in vp-major chunk order; a fresh list of num_chunks + 1."""
        return list(self.chunk_boundaries)

    @property
    def num_chunks(self) -> int:
        """Model chunks over all ranks: num_stages * virtual_stages."""
        return len(self.chunk_boundaries) - 1

    @property
    def virtual_stages(self) -> int:
        """Model chunks on each rank; 1 without interleaving."""
        return self.num_chunks // self.num_stages

    @property
    def num_layers(self) -> int:
        """Decoder layers, without MTP."""
        return self.chunk_boundaries[-1]

    @property
    def mtp_owner(self) -> tuple[int, int] | None:
        """(pp_rank, vp_stage) that holds the MTP layers; None when there are none."""
        return None if self.mtp_chunk is None else self._owner_of_chunk(self.mtp_chunk)

    def layers_of(self, pp_rank: int, vp_stage: int = 0) -> tuple[int, ...]:
        """1-based numbers of the layers that a chunk owns, ascending; empty for an empty chunk.

        Raises:
            LayoutError: there is no such pp_rank or vp_stage.
        """
        if not (0 <= pp_rank < self.num_stages and 0 <= vp_stage < self.virtual_stages):
            raise LayoutError(
                f"no chunk (pp_rank {pp_rank}, vp_stage {vp_stage}) in a layout of "
                f"{self.num_stages} stages with {self.virtual_stages} chunks each"
            )
        chunk = vp_stage * self.num_stages + pp_rank
        return tuple(range(self.chunk_boundaries[chunk] + 1, self.chunk_boundaries[chunk + 1] + 1))

    def owner_of(self, layer_number: int) -> tuple[int, int]:
        """(pp_rank, vp_stage) that owns a layer.

        Raises:
            LayoutError: there is no such layer.
        """
        if not 1 <= layer_number <= self.num_layers:
            raise LayoutError(f"no layer {layer_number}: the layout has 1 to {self.num_layers}")
        # The first boundary that reaches the layer closes its chunk; empty chunks never do.
        return self._owner_of_chunk(bisect_left(self.chunk_boundaries, layer_number) - 1)

    def num_layers_of_rank(self, pp_rank: int) -> int:
        """Decoder layers of a rank over all its chunks."""
        return sum(len(self.layers_of(pp_rank, vp)) for vp in range(self.virtual_stages))

    def with_boundaries(self, boundaries: Sequence[int]) -> LayerLayout:
        """The same stages, virtual stages and MTP placement with other boundaries."""
        return LayerLayout.from_boundaries(
            boundaries,
            num_stages=self.num_stages,
            virtual_stages=self.virtual_stages,
            mtp_num_layers=self.mtp_num_layers,
            mtp_chunk=self.mtp_chunk,
        )

    def to_megatron(self) -> str:
        """The canonical short text of this layout, which Megatron parses to the same layout."""
        chunks = []
        for chunk in range(self.num_chunks):
            size = self.chunk_boundaries[chunk + 1] - self.chunk_boundaries[chunk]
            mtp = self.mtp_num_layers if chunk == self.mtp_chunk else 0
            chunks.append(repeat("t", size) + repeat("m", mtp))
        if len(chunks) == 1:
            return f"E{chunks[0]}L"
        text = f"E{chunks[0]}|"
        for middle, run in groupby(chunks[1:-1]):
            count = len(list(run))
            folded = count >= _MIN_CHUNKS_TO_FOLD
            text += f"({middle}|)*{count}" if folded else f"{middle}|" * count
        return f"{text}{chunks[-1]}L"

    def __str__(self) -> str:
        return self.to_megatron()

    def _owner_of_chunk(self, chunk: int) -> tuple[int, int]:
        vp_stage, pp_rank = divmod(chunk, self.num_stages)
        return pp_rank, vp_stage


# -------------------------------------------------------------------- checking


def _check_boundaries(boundaries: tuple[int, ...], num_stages: int) -> None:
    """Refuse boundaries that are not 0 <= ... ascending over a multiple of num_stages chunks."""
    num_chunks = len(boundaries) - 1
    if num_stages < 1 or num_chunks < 1 or num_chunks % num_stages:
        raise LayoutError(
            f"{num_chunks} chunks on {num_stages} pipeline stages: the number of chunks must be a "
            "positive multiple of the number of stages"
        )
    if boundaries[0] != 0:
        raise LayoutError(f"the first boundary is {boundaries[0]}: it must be 0")
    for chunk, (begin, end) in enumerate(pairwise(boundaries)):
        if end < begin:
            vp_stage, pp_rank = divmod(chunk, num_stages)
            raise LayoutError(
                f"the boundaries of (pp_rank {pp_rank}, vp_stage {vp_stage}) run backwards, from "
                f"{begin} to {end}: every boundary must be at least the one before it"
            )


def _check_mtp(layout: LayerLayout) -> None:
    """Refuse MTP layers where Megatron does not allow them."""
    if layout.mtp_num_layers < 0:
        raise LayoutError(f"{layout.mtp_num_layers} MTP layers: the number cannot be negative")
    if layout.mtp_chunk is None:
        return
    if not 0 <= layout.mtp_chunk < layout.num_chunks:
        raise LayoutError(f"MTP in chunk {layout.mtp_chunk} of {layout.num_chunks}")
    pp_rank, vp_stage = layout._owner_of_chunk(layout.mtp_chunk)
    where = f"MTP layers on (pp_rank {pp_rank}, vp_stage {vp_stage})"
    if vp_stage != layout.virtual_stages - 1:
        raise LayoutError(
            f"{where}: Megatron wants them in the last vp_stage, {layout.virtual_stages - 1}"
        )
    behind = layout.num_layers - layout.chunk_boundaries[layout.mtp_chunk + 1]
    if behind:
        raise LayoutError(f"{where}: {behind} decoder layers come after them, none may")


def _add_or_remove(missing: int, letter: str) -> str:
    """Say what to change to reach the wanted count."""
    return f"add {missing} {letter}" if missing > 0 else f"remove {-missing} {letter}"


def _nearest_multiple_advice(num_chunks: int, num_stages: int) -> str:
    """Say how many chunks would do."""
    if num_stages < 1:
        return "the pipeline size must be at least 1"
    fewer = num_chunks // num_stages * num_stages
    choices = [str(count) for count in (fewer, fewer + num_stages) if count]
    return f"use {' or '.join(choices)} chunks"
