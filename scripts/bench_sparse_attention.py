"""Sparse against dense core attention: forward and backward of one layer, on one thread.

Megatron's own DotProductAttention and the same module with hash attention in its place, hashing and
sorting included, take turns in one process. Times are the thread's CPU time, so that other work on
the machine does not count; ratios are medians over turns.

    make bench-sparse-attention
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_dynmo.cpu import cpu_specs
from megatron_dynmo.patching import patched
from scripts.results import write_results

HEADS, HEAD_DIM = 4, 64
CASES = ((2, 1), (4, 1), (8, 1), (16, 1), (8, 2))  # buckets, rounds

console = Console()


@dataclass
class Variant:
    """One way to attend, and what it took.

    Attributes:
        attend: runs the core attention on query, key and value.
        forward_ms, backward_ms: of every turn.
        scores: computed and causal, of the last turn.
    """

    name: str
    attend: Callable[..., torch.Tensor]
    buckets: int = 1
    rounds: int = 1

    def __post_init__(self) -> None:
        self.forward_ms: list[float] = []
        self.backward_ms: list[float] = []
        self.scores = (1, 1)

    @property
    def total_ms(self) -> list[float]:
        return [a + b for a, b in zip(self.forward_ms, self.backward_ms, strict=True)]

    def run(self, inputs: list[torch.Tensor], grad: torch.Tensor) -> None:
        start = time.thread_time()
        context = self.attend(*inputs)
        middle = time.thread_time()
        context.backward(grad)
        self.forward_ms.append((middle - start) * 1e3)
        self.backward_ms.append((time.thread_time() - middle) * 1e3)


def attention(seed: int) -> Any:
    """A holder of Megatron's own core attention, as a layer's `self_attention` is."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
    core = DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    return SimpleNamespace(
        core_attention=core,
        config=config,
        pg_collection=groups,
        attn_mask_type=AttnMaskType.causal,
        seed=seed,
    )


def variants() -> list[Variant]:
    from megatron_dynmo.dynamics.sparse_attention.core import SparseCore
    from megatron_dynmo.dynamics.sparse_attention.hash_codes import Hashing

    found = [Variant("dense", attention(0).core_attention)]
    for buckets, rounds in CASES:
        holder = attention(buckets)
        variant = Variant(
            f"hash, {buckets} buckets, {rounds} round{'s' * (rounds > 1)}",
            holder.core_attention,
            buckets,
            rounds,
        )

        def count(computed: torch.Tensor, causal: int, variant: Variant = variant) -> None:
            variant.scores = (int(computed), causal)

        hashing = Hashing(buckets, rounds, is_shared=False, seed=1, iteration=1)
        SparseCore(holder, 1, lambda hashing=hashing: hashing, count)
        found.append(variant)
    return found


def measure(length: int, turns: int) -> list[dict[str, Any]]:
    """Run all variants in turn and return a row of each."""
    torch.manual_seed(0)
    shape = (length, 1, HEADS, HEAD_DIM)
    inputs = [torch.randn(shape).requires_grad_() for _ in range(3)]
    grad = torch.randn(length, 1, HEADS * HEAD_DIM)
    everyone = variants()
    attend = everyone[0].attend
    everyone[0].attend = lambda q, k, v: attend(q, k, v, None)
    for variant in everyone[1:]:
        variant.attend = lambda q, k, v, core=variant.attend: core(q, k, v, None)
    for _ in range(turns + 1):
        for variant in everyone:
            variant.run(inputs, grad)
    rows = []
    for variant in everyone:
        del variant.forward_ms[0], variant.backward_ms[0]  # warm-up
        computed, causal = variant.scores
        pairs = zip(everyone[0].total_ms, variant.total_ms, strict=True)
        rows.append(
            {
                "cell": f"{variant.name}, {length} tokens",
                "buckets": variant.buckets,
                "rounds": variant.rounds,
                "share_of_square": computed * (length + 1) / 2 / length / causal
                if variant is not everyone[0]
                else 1.0,
                "share_of_causal": computed / causal if variant is not everyone[0] else None,
                "forward_ms": statistics.median(variant.forward_ms),
                "backward_ms": statistics.median(variant.backward_ms),
                "speedup": statistics.median(stock / ours for stock, ours in pairs),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, patched(cpu_specs()):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        dist.init_process_group("gloo", f"file://{folder}/meet", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        rows = [row for n in options.lengths for row in measure(n, options.turns)]
        dist.destroy_process_group()
    table = Table("", "of square", "of causal", "forward ms", "backward ms", "speed-up")
    for row in rows:
        of_causal = row["share_of_causal"]
        table.add_row(
            row["cell"],
            f"{row['share_of_square']:.1%}",
            "" if of_causal is None else f"{of_causal:.1%}",
            f"{row['forward_ms']:.0f}",
            f"{row['backward_ms']:.0f}",
            f"{row['speedup']:.2f}x",
        )
    console.print(table)
    write_results("sparse_attention", "real", "make bench-sparse-attention", rows)


if __name__ == "__main__":
    main()
