"""One GPU: layers timed by CUDA events, detached and attached; state codec; memory given back.

Each run is a process of its own with one rank over NCCL, started as a launcher would start it.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynmo.telemetry.events import read_events
from tests.e2e.training import TINY_GPT
from tests.gpu.one_rank import KINDS, adam_of, require_right

ROOT = Path(__file__).parents[2]
# Only reproducible kernels: numbers are compared bit for bit.
EXACT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
MODULES = {
    "torch": "torch.optim", "group": "tests.gpu", "te": "transformer_engine", "apex": "apex",
}  # fmt: skip


def one_rank(*words: str) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ, **EXACT, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    return result.stdout


@pytest.mark.parametrize("flags", [(), ("--use-distributed-optimizer",)], ids=["bf16", "sharded"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_come_and_go_on_a_gpu(kind, flags):
    if adam_of(kind) is None:
        pytest.skip(f"{MODULES[kind]} is not installed")
    moved, unmoved = (
        json.loads(
            one_rank("tests.gpu.one_rank", kind, moves, "--deterministic-mode", *flags)
            .strip()
            .splitlines()[-1]
        )
        for moves in ("moved", "unmoved")
    )
    require_right(moved, unmoved)
    (module,) = moved["watched"][3]["optimizers"]
    assert module.startswith(MODULES[kind])


def test_cuda_events_time_every_layer(tmp_path):
    one_rank(
        *("megatron_dynmo.pretrain_gpt", *TINY_GPT, "--transformer-impl", "local", "--bf16"),
        *("--hidden-size", "512", "--seq-length", "256", "--max-position-embeddings", "256"),
        *("--train-iters", "12", "--dynmo-mode", "observe", "--dynmo-log-dir", str(tmp_path)),
    )
    events = read_events(tmp_path / "events.jsonl")
    times = {e["iteration"]: e["iteration_ms"] for e in events if e["event"] == "iteration"}
    profiles = [event for event in events if event["event"] == "profile"]
    assert profiles, "no window was full"
    last = profiles[-1]
    assert [layer["layer_number"] for layer in last["layers"]] == [1, 2, 3, 4]
    for layer in last["layers"]:
        assert layer["forward_ms"] > 0 and layer["backward_ms"] > 0, layer
        assert layer["memory_bytes"] > 0, layer
    # Layers run one after another on one stream, four micro-batches an iteration.
    busy = 4 * sum(layer["forward_ms"] + layer["backward_ms"] for layer in last["layers"])
    assert busy < 1.1 * max(times.values()), (busy, times)


def test_sparse_tensor_cores_multiply_as_dense_ones_do():
    import torch

    from megatron_dynmo.dynamics.pruning.sparse_linear import Pattern, Products, sparse_linear

    generator = torch.Generator("cuda").manual_seed(1)
    groups = torch.rand(256 * 512 // 4, 4, generator=generator, device="cuda")
    kept = groups.argsort(dim=1)[:, :2].sort(dim=1).values
    places = (kept + 4 * torch.arange(len(groups), device="cuda")[:, None]).flatten()
    pattern = Pattern(places.to(torch.int32), 256, 512)
    values = torch.randn(len(places), generator=generator, device="cuda").bfloat16()
    x = torch.randn(128, 512, generator=generator, device="cuda").bfloat16()
    found = sparse_linear(x, values, pattern, Products(compressed=True))
    again = sparse_linear(x, values, pattern, Products(compressed=True))
    assert torch.equal(found, again)
    exact = x.double() @ pattern.dense(values).double().t()
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-1)
