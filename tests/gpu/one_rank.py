"""One rank of one stage: layers put back where they were, taken out, and put in again.

Everything that a move does to a rank but the bytes on their way: a new layer is built and filled,
wrapper and optimizer are rebuilt, the state goes back. Runs on a GPU and on a CPU.

    python -m tests.gpu.one_rank KIND {moved,unmoved} FLAGS
"""

from __future__ import annotations

import gc
import io
import json
import sys
from typing import Any

import torch

from tests.e2e.moving import train_ours

STEPS = 6
PUT_BACK_AFTER, TAKE_OUT_AFTER = 3, 4
FLAGS = f"--train-iters {STEPS} --transformer-impl local --bf16 --hidden-size 256".split()
KINDS = ("torch", "group", "te", "apex")


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW in the form of the fused ones: `step` counts in the group, not by parameter."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, **_: Any
    ) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue  # does not count, like TransformerEngine's
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_()
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(mean, root.add_(group["eps"]), value=-group["lr"])


def adam_of(kind: str) -> Any:
    """The class that Megatron is to take for Adam; None where it is not installed."""
    try:
        if kind == "te":
            from transformer_engine.pytorch.optimizers import FusedAdam
        elif kind == "apex":
            from apex.optimizers import FusedAdam
        else:
            return GroupStepAdam if kind == "group" else torch.optim.AdamW
    except ImportError:
        return None
    return FusedAdam


def exercise(rank: int, world_size: int, kind: str, moved: bool, *flags: str) -> dict[str, Any]:
    """Train a few steps with an optimizer of this kind, between which layers come and go.

    Args:
        rank: 0.
        world_size: 1.
        kind: of `KINDS`.
        moved: whether anything is moved at all.
        flags: words of the command line, after `FLAGS`.

    Returns:
        What `train_ours` returns. Of `watched`, the answers after the steps `PUT_BACK_AFTER` and
        `TAKE_OUT_AFTER` are those of `put_back` and `take_out`.
    """

    def choose(_: int) -> None:
        from megatron.core import optimizer
        from megatron.core.optimizer import distrib_optimizer

        optimizer.USING_PYTORCH_OPTIMIZER = kind == "torch"
        optimizer.Adam = distrib_optimizer.Adam = adam_of(kind)

    watch = _watch if moved else None
    return train_ours(rank, world_size, watch, choose, *FLAGS, *flags)


def _watch(step: int, model: Any, optimizer: Any) -> Any:
    act = {PUT_BACK_AFTER: put_back, TAKE_OUT_AFTER: take_out}.get(step)
    if act is None:
        return None
    session = _session()
    run = session._run
    before = run.digests()
    answer = act(session)
    used = {type(m.optimizer).__module__ for m in run.optimizer.chained_optimizers}
    return {**answer, "equal": run.digests() == before, "optimizers": sorted(used)}


def _session() -> Any:
    from megatron_dynmo import patching

    return patching.active().controller._session


def put_back(session: Any) -> dict[str, Any]:
    """Build two layers anew in place of themselves, several times.

    Returns:
        `bytes` in use after each time.
    """
    from megatron_dynmo.consensus import Consensus
    from megatron_dynmo.migrator import Migrator
    from megatron_dynmo.plan import LayerMove, MigrationPlan

    run = session._run
    layout = run.stage.layout
    moves = tuple(LayerMove(number, 0, 0, 0, 0) for number in (2, 3))
    # No bytes leave the rank, so there is nothing to transport.
    migrator = Migrator(0, run.stage, None, Consensus(run.device))  # type: ignore[arg-type]
    in_use = []
    for _ in range(4):
        migrator.migrate(MigrationPlan(layout, layout, moves))
        session.observer.attach()
        in_use.append(bytes_in_use(run.device))
    return {"bytes": in_use}


def take_out(session: Any) -> dict[str, Any]:
    """Take the last layer out, keep its state on the host, and put it in again.

    Returns:
        `bytes` in use before, without the layer, and after; `layer_bytes`, parameters, gradients
        and optimizer state of the layer; `held`, the layers that were left meanwhile.
    """
    from megatron_dynmo.plan import LayerMove, MigrationPlan
    from megatron_dynmo.transport import Parcel

    run = session._run
    stage, number = run.stage, run.num_layers
    layout = stage.layout
    layer_bytes = stage.static_bytes()[0][number]
    in_use = [bytes_in_use(run.device)]

    leaves = LayerMove(number, 0, 0, 1, 0)
    plan = MigrationPlan(layout, layout, (leaves,))
    stage.prepare(plan)
    stage.settle()
    parcel = stage.parcel(number)
    label, values, kept = parcel.label, parcel.values, io.BytesIO()  # no tensor that counts
    torch.save({name: t.detach().cpu().clone() for name, t in parcel.tensors.items()}, kept)
    kept.seek(0)
    del parcel
    stage.commit(plan)
    stage.rebuild()
    stage.restore()
    session.observer.attach()
    in_use.append(bytes_in_use(run.device))
    held = sorted(stage.layers())

    comes = LayerMove(number, 1, 0, 0, 0)
    plan = MigrationPlan(layout, layout, (comes,))
    stage.prepare(plan)
    stage.settle()
    slots = stage.slots(comes)
    tensors = torch.load(kept, map_location=run.device)
    for name, slot in slots.items():
        slot.copy_(tensors[name])
    stage.accept(comes, Parcel(label, {**tensors, **slots}, values))
    del slots, tensors
    stage.commit(plan)
    stage.rebuild()
    stage.restore()
    session.observer.attach()
    in_use.append(bytes_in_use(run.device))
    return {"bytes": in_use, "layer_bytes": layer_bytes, "held": held}


def bytes_in_use(device: torch.device) -> int:
    """Memory of live tensors: the allocator's own count on a GPU, a census of objects elsewhere."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def require_right(moved: dict[str, Any], unmoved: dict[str, Any]) -> None:
    """Fail unless the moves changed no number and gave back what they took."""
    for what in ("losses", "grad_norms", "parameters", "moments"):
        assert moved[what] == unmoved[what], what
    back, out = (moved["watched"][after - 1] for after in (PUT_BACK_AFTER, TAKE_OUT_AFTER))
    assert back["equal"] and out["equal"]
    assert out["held"] == [1, 2, 3]
    assert max(back["bytes"]) - min(back["bytes"]) <= 0.01 * max(back["bytes"]), back
    before, without, after = out["bytes"]
    assert before - without >= 0.95 * out["layer_bytes"], out
    assert abs(after - before) <= 0.01 * before, out


if __name__ == "__main__":
    kind, moves, *flags = sys.argv[1:]
    print("\n" + json.dumps(exercise(0, 1, kind, moves == "moved", *flags)))
