"""The load of experts, counted in Megatron's MoE layers and skewed on purpose."""

import math

import pytest

from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.telemetry.events import read_events
from tests.e2e.matrix import BIAS, MOE
from tests.e2e.moving import train_ours
from tests.ranks import run_ranks

EXPERTS, TOP_K, TOKENS, SAMPLES = 4, 2, 32, 4
SINKHORN = ("--moe-router-load-balancing-type", "sinkhorn")


def count_beside(rank):
    """Count by a second way: what each router returned, with nothing but its own shapes."""
    from megatron.core.transformer.moe.router import TopKRouter

    routing = TopKRouter.routing
    TopKRouter.seen = {}

    def noted(self, logits, padding_mask=None):
        probs, routing_map = routing(self, logits, padding_mask)
        rows = TopKRouter.seen.setdefault(self.layer_number, [])
        rows.append(routing_map.sum(dim=0).tolist())
        return probs, routing_map

    TopKRouter.routing = noted


def counts_of_step(step, model, optimizer):
    """By layer, the tokens of each expert in this step on this rank."""
    from megatron.core.transformer.moe.router import TopKRouter

    found = {
        number: [sum(column) for column in zip(*rows, strict=True)]
        for number, rows in TopKRouter.seen.items()
    }
    TopKRouter.seen.clear()
    return found


def loads(log_dir, iteration=1):
    """The layers of the first event of the kind."""
    events = read_events(log_dir / EVENTS_FILE)
    (event,) = (e for e in events if e["event"] == "dynamics" and e["iteration"] == iteration)
    return {layer["layer_number"]: layer for layer in event["layers"]}


def test_counts_and_skew_of_ranks_are_those_of_the_routers(tmp_path):
    flags = (*MOE, "--expert-model-parallel-size", "2", "--dynmo-moe-skew", "zipf:exponent=2")
    found = run_ranks(
        *(train_ours, 2, counts_of_step, count_beside, *flags),
        *("--dynmo-log-dir", str(tmp_path), "--train-iters", "2"),
    )
    first = [result["watched"][0] for result in found]
    layers = loads(tmp_path)
    assert sorted(layers) == [2, 3, 4]
    for number, layer in layers.items():
        total = [a + b for a, b in zip(first[0][number], first[1][number], strict=True)]
        assert layer["tokens_per_expert"] == total
        assert sum(total) == SAMPLES * TOKENS * TOP_K
        by_rank = total[: EXPERTS // 2], total[EXPERTS // 2 :]
        most = max(sum(part) for part in by_rank) / (sum(total) / 2)
        assert layer["rank_max_over_mean"] == pytest.approx(most)
        assert layer["expert_max_over_mean"] == pytest.approx(max(total) * EXPERTS / sum(total))
        # The most wanted expert is another one in every layer.
        assert total.index(max(total)) == (number - 1) % EXPERTS


@pytest.mark.matrix
def test_every_way_to_balance_is_counted_once_also_under_recompute(tmp_path):
    ways = {
        "topk": ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
        "sinkhorn": (*SINKHORN, "--recompute-granularity", "full", "--recompute-method", "uniform",
                     "--recompute-num-layers", "1"),
        "bias": BIAS,
    }  # fmt: skip
    uneven = {}
    for name, flags in ways.items():
        run_ranks(
            *(train_ours, 1, None, None, *MOE, *flags, "--dynmo-moe-skew", "zipf:exponent=2"),
            *("--dynmo-log-dir", str(tmp_path / name), "--train-iters", "1"),
        )
        layers = loads(tmp_path / name)
        for layer in layers.values():
            assert sum(layer["tokens_per_expert"]) == SAMPLES * TOKENS * TOP_K
            assert layer["rank_max_over_mean"] == 1
        uneven[name] = max(layer["expert_max_over_mean"] for layer in layers.values())
    # Sinkhorn undoes a skew that the same logits cause without it.
    assert 1 <= uneven["sinkhorn"] < 1.3 < uneven["topk"]
    assert math.isfinite(uneven["bias"])
