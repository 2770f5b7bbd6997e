"""Stock Megatron trains on a CPU over gloo, in every kind of parallelism, and resumes exactly."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.training import train
from tests.ranks import run_ranks

PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"
DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --moe-aux-loss-coeff 0.01"
)

# What is not here trains in a test below: the distributed optimizer, its overlaps, recompute.
CELLS = {
    "pp2": (2, PP2),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2-virtual-stages": (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "pp2-bf16": (2, f"{PP2} --bf16"),
    "pp2-fp16": (2, f"{PP2} --fp16 --initial-loss-scale 65536"),
    "tp2": (2, TP2),
    "tp2-sequence-parallel-rope": (
        2,
        f"{TP2} --sequence-parallel --position-embedding-type rope --swiglu "
        "--normalization RMSNorm --untie-embeddings-and-output-weights",
    ),
    "moe-ep1": (1, MOE),
    "moe-ep2": (2, f"{MOE} --expert-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
}


def _train(world_size: int, flags: str) -> list[dict[str, Any]]:
    return run_ranks(train, world_size, *flags.split())


def _numbers(texts: list[str]) -> list[float]:
    return [float.fromhex(text) for text in texts]


@pytest.mark.parametrize("cell", CELLS)
def test_trains(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    ranks = _train(*CELLS[cell])
    assert len({tuple(rank["grad_norms"]) for rank in ranks}) == 1, "ranks disagree"
    grad_norms = _numbers(ranks[0]["grad_norms"])
    losses = [float.fromhex(step["lm loss"]) for step in ranks[-1]["losses"]]
    assert len(losses) == len(grad_norms) == 4
    assert all(0.1 < grad_norm < 10 for grad_norm in grad_norms)
    # A vocabulary of 127, padded to 128 words for each tensor-parallel rank, all equally likely.
    padded = 256 if "tensor" in CELLS[cell][1] else 128
    assert losses[0] == pytest.approx(math.log(padded), abs=0.15)
    assert losses[-1] < losses[0]


@pytest.mark.matrix
def test_overlap_changes_no_bit() -> None:
    # The order in which the gradient norm is summed follows the buckets, so nothing is clipped.
    flags = f"{DISTRIBUTED_OPTIMIZER} --bf16 --clip-grad 0 --ddp-bucket-size 4000"
    plain, overlapped = (_train(2, f"{flags} {overlap}") for overlap in ("", OVERLAP))
    for one, other in zip(plain, overlapped, strict=True):
        assert other["losses"] == one["losses"]
        assert other["parameters"] == one["parameters"]


@pytest.mark.matrix
def test_recompute_with_dropout_changes_no_bit() -> None:
    plain, recomputed = (_train(2, f"{PP2} {DROPOUT} {flags}") for flags in ("", RECOMPUTE))
    assert plain == recomputed


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            f"{PP2} {DROPOUT} {RECOMPUTE}", id="pp2-fp32-dropout", marks=pytest.mark.matrix
        ),
        pytest.param(f"{PP2} --bf16", id="pp2-bf16", marks=pytest.mark.matrix),
        pytest.param(
            f"{TP2} --sequence-parallel {DROPOUT}",
            id="tp2-sequence-parallel-dropout",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            f"{DISTRIBUTED_OPTIMIZER} {DROPOUT}",
            id="dp2-fp32-dp-reshardable",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            f"{DISTRIBUTED_OPTIMIZER} {OVERLAP} --bf16 --dist-ckpt-optim-fully-reshardable",
            id="dp2-bf16-overlap-fully-reshardable",
        ),
        pytest.param(
            f"{MOE} --expert-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER} --bf16",
            id="moe-ep2-bf16-dp-reshardable",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(flags: str, tmp_path: Path) -> None:
    whole = _train(2, f"{flags} --save {tmp_path} --save-interval 2")
    _forget_after(tmp_path, 2)
    resumed = _train(2, f"{flags} --load {tmp_path}")
    for one, other in zip(whole, resumed, strict=True):
        assert other["grad_norms"] == one["grad_norms"][2:]
        assert other["losses"] == one["losses"][2:]
        assert other["parameters"] == one["parameters"]
        assert other["moments"] == one["moments"]


@pytest.mark.matrix
def test_sequence_parallel_gives_the_same_gradients(tmp_path: Path) -> None:
    whole = _train(2, f"{TP2} --save {tmp_path} --save-interval 2")
    _forget_after(tmp_path, 2)
    # The two start from other random numbers, so they are compared from one checkpoint.
    parallel = _train(2, f"{TP2} --sequence-parallel --load {tmp_path}")
    expected = _numbers(whole[0]["grad_norms"][2:])
    assert _numbers(parallel[0]["grad_norms"]) == pytest.approx(expected, rel=1e-5)


def _forget_after(folder: Path, iteration: int) -> None:
    """Make Megatron load the checkpoint of an earlier iteration."""
    assert (folder / f"iter_{iteration:07}").is_dir()
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def test_random_streams_are_those_of_a_gpu() -> None:
    first, second = run_ranks(_draw, 2)
    for name in ("default", "default again", "after the fork"):
        assert np.array_equal(first[name], second[name]), name
    assert not np.array_equal(first["model parallel"], second["model parallel"])
    for drawn in (first, second):
        assert np.array_equal(drawn["model parallel"], drawn["model parallel, restored"])
        assert np.array_equal(drawn["after the fork"], drawn["default, without a fork"])
        assert np.array_equal(drawn["default"], drawn["default again"])
        assert drawn["warnings"] == 0


def _draw(rank: int, world_size: int) -> dict[str, Any]:
    import logging

    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    from megatron_dynmo.cpu import cpu_specs
    from megatron_dynmo.patching import patched

    def mask() -> np.ndarray:
        return torch.nn.functional.dropout(torch.ones(64), 0.5).numpy()

    warnings: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = warnings.append  # type: ignore[method-assign]
    logging.getLogger(random.__name__).addHandler(handler)
    with patched(cpu_specs()):
        parallel_state.initialize_model_parallel(world_size)
        random.model_parallel_cuda_manual_seed(1234)
        tracker = random.get_cuda_rng_tracker()
        start, states = torch.cuda.get_rng_state(), tracker.get_states()
        drawn: dict[str, Any] = {"default": mask()}
        with tracker.fork():
            drawn["model parallel"] = mask()
        drawn["after the fork"] = mask()

        torch.cuda.set_rng_state(start)
        tracker.set_states(states)
        drawn["default again"], drawn["default, without a fork"] = mask(), mask()
        with tracker.fork():
            drawn["model parallel, restored"] = mask()
    drawn["warnings"] = len(warnings)
    return drawn


def test_undo_restores_every_object_of_torch_and_megatron() -> None:
    assert run_ranks(_apply_and_undo, 1, init_process_group=False) == [[]]


def _apply_and_undo(rank: int, world_size: int) -> list[str]:
    """Train a model, undo, and return every attribute that is not what it was."""
    import torch

    from megatron_dynmo.cpu import cpu_specs
    from megatron_dynmo.patches import checkpoint_fixes
    from megatron_dynmo.patching import PatchSet

    patches = PatchSet((*cpu_specs(), *checkpoint_fixes.specs()))
    assert patches.check() == []
    before = _snapshot()
    patches.apply()
    changed = _differences(before)
    assert {"torch.zeros", "torch.cuda.current_stream", "torch.Tensor.type"} <= set(changed)
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    patches.revert()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    return _differences(before)


def _snapshot() -> dict[str, tuple[Any, str, Any]]:
    """Hold every attribute of torch's and Megatron's modules and classes, by name."""
    held = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("torch", "megatron") or module is None:
            continue
        for name, value in list(vars(module).items()):
            held[f"{module_name}.{name}"] = (module, name, value)
            if isinstance(value, type) and value.__module__.startswith(("torch", "megatron")):
                for attribute, inner in list(vars(value).items()):
                    if not attribute.startswith("__") or attribute in ("__new__", "__init__"):
                        held[f"{module_name}.{name}.{attribute}"] = (value, attribute, inner)
    return held


def _differences(before: dict[str, tuple[Any, str, Any]]) -> list[str]:
    """Name what is held no more, or is held in addition by something that was there."""
    gone = object()
    changed = [
        label
        for label, (owner, name, value) in before.items()
        if vars(owner).get(name, gone) is not value
    ]
    added = [label for label in _snapshot() if label not in before]
    return changed + [label for label in added if "." in label and _is_ours(label)]


def _is_ours(label: str) -> bool:
    """Whether an attribute that was not there before belongs to a class that the patches touch."""
    return label.startswith(("torch.Tensor.", "torch.nn.Module.", "torch.cuda."))


def test_nothing_of_it_is_imported_where_a_gpu_is_used() -> None:
    assert run_ranks(_import_for_a_gpu, 1, init_process_group=False) == [[]]


def _import_for_a_gpu(rank: int, world_size: int) -> list[str]:
    from megatron_dynmo.config import DynMoConfig
    from megatron_dynmo.patches import specs_for

    assert specs_for(DynMoConfig(), on_cpu=False)
    return [name for name in sys.modules if name.startswith("megatron_dynmo.cpu")]
