"""What is refused before training: features that cannot be moved, splits that lose layers."""

from argparse import Namespace

import pytest

from megatron_dynmo.adapters import support
from megatron_dynmo.adapters.support import UNSUPPORTED, require_legal_split, require_movable
from megatron_dynmo.errors import ConfigError, LayoutError
from megatron_dynmo.layout import LayerLayout

# Megatron's own defaults of what a feature is told from.
QUIET = {
    "cuda_graph_impl": "none",
    "optimizer": "adam",
    "cpu_offloading_num_layers": 0,
    "hybrid_layer_pattern": None,
    "logits_load_dir": None,
    "gtp_weight_remat_size": 1,
}
# What turns a feature on, where it is not an argument of the flag's name that is True.
ON = {
    "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    "--optimizer": {"optimizer": "lion"},
    "--cpu-offloading-num-layers": {"cpu_offloading_num_layers": 2},
    "--hybrid-layer-pattern": {"hybrid_layer_pattern": "M-M*"},
    "--logits-load-dir": {"logits_load_dir": "folder"},
    "--use-nccl-ub": {"nccl_ub": True},
    "--tensor-parallel-num-weight-shards": {"gtp_weight_remat_size": 2},
}
DESTS = [feature.flag.removeprefix("--").replace("-", "_") for feature in UNSUPPORTED]


def features(**on) -> Namespace:
    return Namespace(**{**dict.fromkeys(DESTS, False), **QUIET, **on})


def test_nothing_is_refused_of_a_plain_run():
    require_movable(features())
    require_movable(features(optimizer="sgd"))
    require_movable(features(optimizer="muon"))
    require_movable(Namespace())  # an older Megatron may lack some arguments


@pytest.mark.parametrize("feature", UNSUPPORTED, ids=lambda feature: feature.flag)
def test_each_feature_is_named_with_reason_and_remedy(feature):
    dest = feature.flag.removeprefix("--").replace("-", "_")
    args = features(**ON.get(feature.flag, {dest: True}))
    with pytest.raises(ConfigError) as error:
        require_movable(args)
    text = str(error.value)
    assert f"cannot move layers with {feature.flag}: {feature.reason}." in text
    assert "--dynmo-mode observe" in text and "leave the feature out" in text
    assert len(text.splitlines()) == 1


def test_all_features_are_named_at_once():
    args = features(use_megatron_fsdp=True, optimizer_cpu_offload=True, optimizer="lion")
    with pytest.raises(ConfigError) as error:
        require_movable(args)
    found = [feature.flag for feature in UNSUPPORTED if f"{feature.flag}: " in str(error.value)]
    assert found == ["--use-megatron-fsdp", "--optimizer-cpu-offload", "--optimizer"]


def test_muon_is_refused_beside_the_distributed_optimizer():
    with pytest.raises(ConfigError, match=r"--optimizer: .* without --use-distr"):
        require_movable(features(optimizer="muon", use_distributed_optimizer=True))
    with pytest.raises(ConfigError, match="--optimizer: "):
        require_movable(features(optimizer="dist_muon"))
    require_movable(features(optimizer="adam", use_distributed_optimizer=True))


def test_the_features_that_the_issue_of_moves_names_are_there():
    flags = {feature.flag for feature in UNSUPPORTED}
    assert flags >= {
        "--cuda-graph-impl",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--cpu-offloading-num-layers",
        "--fine-grained-activation-offloading",
        "--optimizer-cpu-offload",
        "--ckpt-assume-constant-structure",
    }


def split(num_layers: int, stages: int, **given) -> Namespace:
    defaults = {
        "num_layers": num_layers,
        "pipeline_model_parallel_size": stages,
        "pipeline_model_parallel_layout": None,
        "hybrid_layer_pattern": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
    }
    return Namespace(**{**defaults, **given})


@pytest.mark.parametrize(
    "args",
    [
        split(5, 1),
        split(4, 2),
        split(8, 2, num_layers_per_virtual_pipeline_stage=2),
        split(8, 2, num_virtual_stages_per_pipeline_rank=4),
        split(5, 2, decoder_first_pipeline_num_layers=2),
        split(5, 2, decoder_last_pipeline_num_layers=2),
        split(7, 3, decoder_first_pipeline_num_layers=2, decoder_last_pipeline_num_layers=3),
        split(4, 2, pipeline_model_parallel_layout="E|ttttL"),
        split(4, 2, pipeline_model_parallel_layout="Et|t||ttL"),
        split(61, 16, pipeline_model_parallel_layout="Et|(tt|)*30L"),
        # Megatron's own arithmetic decides about these.
        split(5, 2, account_for_loss_in_pipeline_split=True),
        split(5, 2, hybrid_layer_pattern="M*"),
        split(None, 2),
    ],
)
def test_legal_splits_pass(args):
    require_legal_split(args)


def refused(args: Namespace) -> str:
    with pytest.raises(LayoutError) as error:
        require_legal_split(args)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def offered(text: str, num_layers: int, stages: int) -> LayerLayout:
    """The layout between quotes in a message, which must work for the model."""
    layout = text.split("'")[1]
    return LayerLayout.from_megatron(layout, num_layers=num_layers, num_stages=stages)


def test_case_01_layers_that_do_not_divide():
    """30 layers on 4 stages became 28 in silence once; 5 on 2 must never become 4."""
    text = refused(split(5, 2))
    assert "5 layers do not divide into 2 equal chunks" in text
    assert offered(text, 5, 2).boundaries == [0, 3, 5]
    layout = offered(refused(split(30, 4)), 30, 4)
    assert [layout.num_layers_of_rank(r) for r in range(4)] == [8, 8, 7, 7]


def test_case_02_first_and_last_that_leave_layers_over():
    """48 layers with 11 first and 13 last lost the other 24."""
    first_last = {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 3}
    text = refused(split(8, 2, **first_last))
    assert "first and last stage take 5 of 8 layers, 3 are left for 0 stages" in text
    assert offered(text, 8, 2).num_layers == 8
    first_last = {"decoder_first_pipeline_num_layers": 11, "decoder_last_pipeline_num_layers": 13}
    assert "take 24 of 48 layers, 24 are left" in refused(split(48, 2, **first_last))


def test_case_04_virtual_chunks_that_drop_layers():
    """80 layers in chunks of 2 over 16 stages ran 64 of them."""
    text = refused(split(7, 2, num_layers_per_virtual_pipeline_stage=2))
    assert "3 layers would be left over" in text
    assert offered(text, 7, 2).virtual_stages == 2
    text = refused(split(80, 16, num_layers_per_virtual_pipeline_stage=2))
    assert "16 layers would be left over" in text
    layout = offered(text, 80, 16)
    assert layout.num_chunks == 32
    assert [layout.num_layers_of_rank(rank) for rank in range(16)] == [5] * 16


def test_case_08_a_count_is_told_and_not_a_syntax_error():
    for layout in ("Et|(tt|)*29L|", "Et|(tt|)*29|L", "Et|(tt|)*28t|t|L"):
        text = refused(split(61, 16, pipeline_model_parallel_layout=layout))
        assert text.startswith("59 of 61 layers")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"decoder_first_pipeline_num_layers": 1}, "--decoder-first-pipeline-num-layers"),
        ({"decoder_last_pipeline_num_layers": 0}, "--decoder-last-pipeline-num-layers"),
        ({"account_for_loss_in_pipeline_split": True}, "--account-for-loss-in-pipeline-split"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "--num-layers-per-virtual-pipeline-stage"),
    ],
)
def test_case_10_a_split_given_twice(given, named):
    text = refused(split(4, 2, pipeline_model_parallel_layout="Et|tttL", **given))
    assert named in text and "'Et|tttL'" in text and "drop either" in text


def test_wrong_letters_and_stages_of_a_layout():
    assert "unknown letters 'x'" in refused(split(4, 2, pipeline_model_parallel_layout="Etx|ttL"))
    assert "3 chunks on 2 pipeline stages" in refused(
        split(4, 2, pipeline_model_parallel_layout="Et|t|ttL")
    )


def test_the_refusal_of_an_older_megatron_needs_no_argument_it_lacks():
    args = split(4, 2, pipeline_model_parallel_layout="Et|tttL")
    del args.account_for_embedding_in_pipeline_split, args.hybrid_layer_pattern
    require_legal_split(args)
    assert support.refusals(args) == []
