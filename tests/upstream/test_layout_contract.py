"""Our reading of a layout text is Megatron's own, letter for letter and layer for layer."""

import random

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_dynmo.errors import LayoutError
from megatron_dynmo.layout import LayerLayout

PIECES = ["t", "t", "tt", "t*3", "|", "|", "||", ",", "(t|)*2", "(tt|t)*3", "(t*2|)*2", "(|t)*2",
          "t*0", "m", "m*2", "E", "L", "*2", "(t)*2*2", "t*(1)*2", "(", ")", "x", "L|"]  # fmt: skip


def random_text(rng: random.Random) -> str:
    body = "".join(rng.choice(PIECES[: rng.choice((13, 13, 15, len(PIECES)))]) for _ in range(6))
    return rng.choice(("E", "E", "E", "E", "|E", "")) + body + rng.choice(("L", "L", "L", "|L", ""))


def megatron_reads(text: str, num_stages: int) -> PipelineParallelLayerLayout | None:
    """Megatron's layout of as many layers as the text holds; None where Megatron refuses."""
    try:
        theirs = PipelineParallelLayerLayout(text, num_stages)
        theirs.validate_layer_layout(
            theirs.flatten_layout.count(LayerType.decoder),
            theirs.flatten_layout.count(LayerType.mtp),
        )
    except (AssertionError, IndexError):
        return None
    return theirs


def assert_same(ours: LayerLayout, theirs: PipelineParallelLayerLayout) -> None:
    assert ours.virtual_stages == theirs.virtual_pipeline_model_parallel_size
    offset = 0
    for vp_stage in range(ours.virtual_stages):
        for pp_rank in range(ours.num_stages):
            kinds = theirs.layout[pp_rank][vp_stage]
            count = kinds.count(LayerType.decoder)
            assert ours.layers_of(pp_rank, vp_stage) == tuple(range(offset + 1, offset + count + 1))
            if LayerType.mtp in kinds:
                assert ours.mtp_owner == (pp_rank, vp_stage)
                assert ours.mtp_num_layers == kinds.count(LayerType.mtp)
            offset += count
    assert (ours.mtp_owner is None) == (LayerType.mtp not in theirs.flatten_layout)


def test_every_text_is_accepted_or_refused_as_megatron_does():
    rng = random.Random(20260101)
    accepted = 0
    for _ in range(6000):
        text, num_stages = random_text(rng), rng.choice((1, 2, 2, 3, 4))
        theirs = megatron_reads(text, num_stages)
        if theirs is None:
            # With a wrong letter or shape there is no count to match: any count must be refused.
            with pytest.raises(LayoutError):
                LayerLayout.from_megatron(
                    text, num_layers=_count_or_zero(text), num_stages=num_stages
                )
            continue
        num_layers = theirs.flatten_layout.count(LayerType.decoder)
        ours = LayerLayout.from_megatron(text, num_layers=num_layers, num_stages=num_stages)
        assert_same(ours, theirs)
        canonical = megatron_reads(ours.to_megatron(), num_stages)
        assert canonical is not None
        assert_same(ours, canonical)
        accepted += 1
    assert accepted > 1000  # the generator must exercise the accepting side too


def _count_or_zero(text: str) -> int:
    try:
        stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        return 0
    return sum(stage.count(LayerType.decoder) for stage in stages)


@pytest.mark.parametrize(
    ("text", "num_stages"),
    [
        ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8),
        ("Et*4|(tttt|)*14tmL", 16),
        ("Et|(tt|)*30L", 16),
        ("Et|(tt|)*29tt|L", 16),
        ("Ettt|(tt|)*29,m|L", 16),
        ("Ett|tt|mm|L", 4),
    ],
)
def test_layouts_from_practice(text, num_stages):
    theirs = megatron_reads(text, num_stages)
    assert theirs is not None
    num_layers = theirs.flatten_layout.count(LayerType.decoder)
    assert_same(
        LayerLayout.from_megatron(text, num_layers=num_layers, num_stages=num_stages), theirs
    )
