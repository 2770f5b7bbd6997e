"""Layout-free numerics against the installed Megatron: contracts, parts of a model, streams."""

from tests.e2e.training import train
from tests.ranks import run_ranks


def contract(rank, world_size):
    """Return the problems found, and whether every place is changed and put back exactly."""
    import importlib

    import megatron.training.training  # noqa: F401  (the entry point, so that all bindings exist)

    from megatron_dynmo.patches import numerics
    from megatron_dynmo.patching import PatchSet

    def held():
        places = []
        for spec in numerics.specs():
            for address in (spec.target, *spec.bindings):
                module, _, name = address.partition(":")
                places.append(getattr(importlib.import_module(module), name))
        return places

    patches = PatchSet(numerics.specs())
    originals = held()
    problems = patches.check()
    patches.apply()
    changed = all(now is not old for now, old in zip(held(), originals, strict=True))
    patches.revert()
    restored = all(now is old for now, old in zip(held(), originals, strict=True))
    return [problem.kind for problem in problems], changed, restored


def test_every_patch_fits_the_installed_megatron_and_comes_off():
    assert run_ranks(contract, 1, init_process_group=False) == [([], True, True)]


def inspect_model(rank, world_size, inspect, *argv):
    """Train one iteration and return what `inspect(model)` says before it."""
    from megatron.training import training

    train_step = training.train_step
    answers = []

    def step(*args, **kwargs):
        if not answers:
            answers.append(inspect(args[2]))
        return train_step(*args, **kwargs)

    training.train_step = step
    train(rank, world_size, "--train-iters", "1", *argv)
    return answers[0]


def parts(model):
    """Return the names that the parts give, with those of the model, and calls by layer."""
    from megatron_dynmo.adapters.layer_reductions import by_layer, parts_of
    from megatron_dynmo.adapters.model import chunks_of

    whole, cut = [], []
    for chunk in chunks_of(model):
        whole += [(name, id(parameter)) for name, parameter in chunk.core.named_parameters()]
    for part in parts_of(model):
        cut += [(name, id(parameter)) for name, parameter in part.named_parameters()]
    calls = []
    by_layer(lambda model, config, group=None: calls.append((len(model), config, group)))(
        model, "config", group="group"
    )
    modules = {id(module) for part in parts_of(model) for module in part.modules()}
    routers = [
        id(module)
        for chunk in chunks_of(model)
        for module in chunk.core.modules()
        if hasattr(module, "expert_bias")
    ]
    return sorted(whole) == sorted(cut), calls, [router in modules for router in routers]


def test_parts_hold_every_parameter_and_router_once():
    moe = ["--num-experts", "2", "--disable-bias-linear", "--moe-router-enable-expert-bias"]
    moe += ["--moe-router-score-function", "sigmoid", "--moe-router-load-balancing-type", "none"]
    [(same, calls, routers)] = run_ranks(inspect_model, 1, parts, *moe)
    assert same
    assert calls == [(1, "config", "group")] * 5  # four layers and the rest
    assert routers == [True] * 4


def streams(model):
    """Return what modules draw in several situations, and how many hooks are left at the end."""
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megatron_dynmo.adapters.layer_rng import LayerRng
    from megatron_dynmo.adapters.model import chunks_of

    [chunk] = chunks_of(model)
    tracker = get_cuda_rng_tracker()

    def num_hooks():
        return sum(
            len(module._forward_pre_hooks) + len(module._forward_hooks)
            for module in chunk.core.modules()
        )

    def draw(layer):
        """Enter and leave a layer by its hooks alone, drawing from each stream between."""
        for hook in layer._forward_pre_hooks.values():
            hook(layer, ())
        drawn = [torch.rand(1).item()]
        for name in ("model-parallel-rng", "expert-parallel-rng"):
            with tracker.fork(name):
                drawn.append(torch.rand(1).item())
        for hook in layer._forward_hooks.values():
            hook(layer, (), None)
        return drawn

    num_before = num_hooks()
    rng = LayerRng(seed=1)
    rng.attach(model)
    num_attached = num_hooks()
    rng.attach(model)
    assert num_hooks() == num_attached > num_before

    one, other = chunk.layers[:2]
    seen = {"twice": (draw(one), draw(one)), "other_layer": draw(other)}
    torch.rand(3)  # moves the stream on, not the seed it was started with
    seen["after_a_draw"] = draw(one)
    with tracker.fork():  # as sequence parallelism runs the whole block
        seen["in_fork"] = (draw(one), draw(one))

    one_layer = chunk.block.layers
    chunk.block.layers = torch.nn.ModuleList(list(one_layer)[1:])
    rng.attach(model)
    seen["left"] = len(one._forward_hooks)
    chunk.block.layers = one_layer
    rng.detach()
    assert num_hooks() == num_before
    return seen


def test_streams_follow_the_layer_and_the_stream_found():
    [seen] = run_ranks(inspect_model, 1, streams)
    first, again = seen["twice"]
    assert first == again == seen["after_a_draw"]
    assert len({*first, *seen["other_layer"]}) == 6
    in_fork, in_fork_again = seen["in_fork"]
    # Inside the fork the generator is the tensor-parallel stream; the expert stream is as ever.
    assert in_fork == in_fork_again
    assert in_fork[0] != first[0]
    assert in_fork[2] == first[2]
    assert seen["left"] == 0


def refusals(model):
    """Return what is said of features whose draws no hook reaches."""
    from megatron_dynmo.adapters.layer_rng import LayerRng
    from megatron_dynmo.adapters.model import model_config
    from megatron_dynmo.errors import ConfigError

    config, said = model_config(model), []
    for name, value, usual in (
        ("cuda_graph_impl", "local", "none"),
        ("overlap_moe_expert_parallel_comm", True, False),
    ):
        setattr(config, name, value)
        try:
            LayerRng(seed=1).attach(model)
        except ConfigError as error:
            said.append(str(error))
        setattr(config, name, usual)
    return said


def test_features_that_no_hook_reaches_are_refused():
    [said] = run_ranks(inspect_model, 1, refusals)
    assert ["--cuda-graph-impl none" in said[0], "leave it out" in said[1]] == [True, True]
