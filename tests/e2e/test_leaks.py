"""Fifty moves leave memory, process groups, hooks, threads and files where they were."""

import sys

import pytest

from tests.e2e.training import TINY_GPT, _pretrain
from tests.ranks import run_ranks

# Ten times the same five moves, after iterations 2 to 51: what is held depends on the layout.
ROUND = ("E|ttttL", "Ettt|tL", "Etttt|L", "Et|tttL", "Ett|ttL")
ROUNDS = 10
MOVES = [f"{2 + n}:{ROUND[n % len(ROUND)]}" for n in range(ROUNDS * len(ROUND))]
ITERATIONS = 2 + len(MOVES)
FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--bf16", "--use-distributed-optimizer"),
    *("--overlap-grad-reduce", "--overlap-param-gather"),
    *("--train-iters", str(ITERATIONS), "--lr-decay-iters", str(ITERATIONS)),
)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_fifty_moves_leave_everything_where_it_was(tmp_path):
    flags = (*FLAGS, "--dynmo-log-dir", str(tmp_path), "--dynmo-force-layout", ";".join(MOVES))
    for held in run_ranks(train, 2, *flags, timeout_s=400):
        assert len(held) == ITERATIONS
        # What follows iteration 1 + 5 n is after n rounds, all in the same layout; what the first
        # two rounds cache stays.
        rounds = held[len(ROUND) :: len(ROUND)]
        for name in rounds[1]:
            assert [after[name] for after in rounds[1:]] == [rounds[1][name]] * (ROUNDS - 1), name
        # A hook left behind by a wrapper that was rebuilt would count a gradient twice.
        assert {after["ready_calls_per_gradient"] for after in held} == {4.0}


def train(rank, world_size, *argv):
    """Train as the drop-in does and say what is held after each iteration.

    Unlike `tests.e2e.moving` it keeps no losses, which would be held too.
    """
    from megatron.training import training

    from megatron_dynmo import launch

    sys.argv = ["pretrain_gpt.py", *TINY_GPT, *argv]
    launch.start()
    count_ready_gradients()
    train_step, held = training.train_step, []

    def watched(*args, **kwargs):
        result = train_step(*args, **kwargs)
        held.append(what_is_held(args[2]))
        return result

    training.train_step = watched
    _pretrain()
    return held


def count_ready_gradients():
    """Count how often gradient hooks say that a gradient is there."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    original = Group.register_grad_ready

    def counting(self, param, *args, **kwargs):
        Group.dynmo_ready_calls += 1
        return original(self, param, *args, **kwargs)

    Group.dynmo_ready_calls, Group.dynmo_gradients = 0, None
    Group.register_grad_ready = counting


def what_is_held(model):
    """Everything that a move could leave behind, after an iteration and its move."""
    import gc
    import os
    import threading

    import torch
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group
    from torch.distributed.distributed_c10d import _world

    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    modules = [module for chunk in model for module in chunk.modules()]
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    # The step that ended had the gradients of the layout before its move.
    calls, gradients = Group.dynmo_ready_calls, Group.dynmo_gradients or len(parameters)
    Group.dynmo_ready_calls, Group.dynmo_gradients = 0, len(parameters)
    layers = [layer for chunk in model for layer in chunk.module.module.decoder.layers]
    return {
        "layers": [layer.layer_number for layer in layers],
        "ready_calls_per_gradient": calls / gradients,
        "tensors": len(tensors),
        "tensor_bytes": sum(storages.values()),
        "parameters": sum(isinstance(found, torch.nn.Parameter) for found in tensors),
        "modules": sum(isinstance(found, torch.nn.Module) for found in gc.get_objects()),
        "module_hooks": sum(_hooks(module) for module in modules),
        "parameter_hooks": sum(_hooks(parameter) for parameter in parameters),
        "process_groups": len(_world.pg_map),
        "threads": threading.active_count(),
        "system_threads": len(os.listdir("/proc/self/task")),
        "open_files": len(os.listdir("/proc/self/fd")),
    }


def _hooks(owner):
    """Hooks of every kind on a module or a parameter."""
    found = [value for name, value in vars(owner).items() if name.endswith(("_hooks", "_hook"))]
    if not hasattr(owner, "named_modules"):
        found += [owner._backward_hooks, owner._post_accumulate_grad_hooks]
    return sum(len(hooks) for hooks in found if hasattr(hooks, "__len__"))
