"""The layout of a checkpoint is found wherever Megatron will load it from."""

from argparse import Namespace

import pytest
import torch

from megatron_dynmo.adapters.checkpoint import (
    require_same_buckets,
    restore_dynamics,
    restore_layout,
    saved_arguments,
)
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.dynamics import Dynamics
from megatron_dynmo.errors import ConfigError


def save(folder, iteration, layout):
    """A checkpoint of one file a rank, as `--ckpt-format torch` writes it."""
    ranks = folder / f"iter_{iteration:07d}" / "mp_rank_00_000"
    ranks.mkdir(parents=True)
    args = Namespace(num_layers=4, pipeline_model_parallel_layout=layout, dynmo_start_layout=None)
    torch.save({"args": args, "model": torch.ones(2)}, ranks / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def arguments(load, **changed):
    return Namespace(
        **{
            "load": str(load),
            "num_layers": 4,
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": None,
            "non_persistent_ckpt_type": None,
            "non_persistent_global_ckpt_dir": None,
            **changed,
        }
    )


@pytest.mark.parametrize(
    ("iteration", "kind", "found"),
    [
        (6, "global", "Et*3|tL"),
        (4, "global", "Et*3|tL"),  # as new: Megatron prefers it
        (2, "global", "Et|t*3L"),
        (6, None, "Et|t*3L"),
    ],
)
def test_a_non_persistent_checkpoint_counts_where_it_is_not_older(tmp_path, iteration, kind, found):
    save(tmp_path, 4, "Et|t*3L")
    save(tmp_path / "non_persistent", iteration, "Et*3|tL")
    args = arguments(tmp_path, non_persistent_ckpt_type=kind)
    restore_layout(args, saved_arguments(args))
    assert args.pipeline_model_parallel_layout == found


def test_the_number_of_layers_may_be_in_the_checkpoint_alone(tmp_path):
    save(tmp_path, 4, "Et|t*3L")
    args = arguments(tmp_path, num_layers=None)
    restore_layout(args, saved_arguments(args))
    assert args.pipeline_model_parallel_layout == "Et|t*3L"


def test_no_checkpoint_is_no_wish(tmp_path):
    args = arguments(tmp_path)
    restore_layout(args, saved_arguments(args))
    assert args.pipeline_model_parallel_layout is None


class NotMegatrons:
    """A class that no checkpoint of Megatron's holds."""


def test_a_file_that_would_run_code_is_left_alone(tmp_path, caplog):
    save(tmp_path, 4, NotMegatrons())
    args = arguments(tmp_path)
    restore_layout(args, saved_arguments(args))
    assert args.pipeline_model_parallel_layout is None
    assert "cannot read the arguments in the checkpoint" in caplog.text


def resuming(**changed):
    return Namespace(
        **{
            "load": "runs/1",
            "finetune": False,
            "no_load_optim": None,
            "use_distributed_optimizer": True,
            "dynmo_mode": "observe",
            **changed,
        }
    )


def test_a_run_without_dynamics_does_not_go_on_where_one_with_them_stopped():
    saved = Namespace(dynmo_dynamics='{"sparse_attention":{"buckets":[4]},"moe":null}')
    with pytest.raises(ConfigError, match="runs/1 was saved with sparse_attention in use"):
        restore_dynamics(resuming(), saved, ())
    args = resuming()
    restore_dynamics(args, saved, ("sparse_attention",))
    assert args.dynmo_dynamics == saved.dynmo_dynamics
    restore_dynamics(resuming(finetune=True), saved, ())
    apart = Namespace(dynmo_dynamics='{"freezing":null}', dynmo_layers_apart=True)
    restore_dynamics(args := resuming(finetune=True), apart, ())
    assert args.hetereogenous_dist_checkpoint, "read as it was saved, layer by layer"
    apart.dynmo_dynamics = '{"pruning":null}'
    with pytest.raises(ConfigError, match="holds pruned layers, whose weights alone"):
        restore_dynamics(resuming(finetune=True), apart, ())
    with pytest.raises(ConfigError, match=r"give the same flags again$"):
        restore_dynamics(resuming(), apart, ())
    restore_dynamics(resuming(), Namespace(dynmo_dynamics='{"moe":null}'), ())
    restore_dynamics(resuming(), None, ())


@pytest.mark.parametrize("text", ["no JSON", "[1]", '"freezing"', "3"])
def test_a_damaged_state_of_dynamics_is_an_explained_error(text):
    with pytest.raises(ConfigError, match=r"cannot be read: .*; resume from an older checkpoint"):
        Dynamics(DynMoConfig(), Namespace(dynmo_dynamics=text))


@pytest.mark.parametrize(
    ("mode", "dynamics", "by_layer", "message"),
    [
        ("observe", None, True, "Megatron's own buckets"),
        ("observe", '{"freezing":{}}', True, None),
        ("observe", '{"moe":null}', False, "a bucket for each layer"),
        ("balance", None, True, None),
        ("observe", None, False, None),
    ],
)
def test_dynamics_cut_the_sharded_state_by_layer_in_observe_mode_too(
    mode, dynamics, by_layer, message
):
    saved = Namespace(dynmo_mode=mode, dynmo_dynamics=dynamics, use_distributed_optimizer=True)
    if message is None:
        require_same_buckets(resuming(), saved, by_layer)
    else:
        with pytest.raises(ConfigError, match=message):
            require_same_buckets(resuming(), saved, by_layer)
