"""A digest of parameters and optimizer state that does not depend on who holds what.

Equal digests mean equal bits in every parameter, master copy and moment, and in every buffer that a
checkpoint holds (the expert bias of a router, say), whatever the layout, and with or without the
distributed optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from megatron_dynmo.adapters.layer_state import saved_buffers
from megatron_dynmo.adapters.optimizer import MAIN, StateCodec
from megatron_dynmo.adapters.shards import assemble, data_parallel_group, latest_step
from megatron_dynmo.adapters.stage import MegatronStage
from megatron_dynmo.adapters.topology import Topology

_SHA_BYTES = 32
EMBEDDING, OUTPUT = "embedding", "output"


def digests(topology: Topology, stage: MegatronStage) -> dict[str, str]:
    """Return the digest of every unit of the model.

    Shards of the distributed optimizer are put together parameter by parameter, so the extra
    memory is that of one parameter. Tensor- and expert-parallel shards are hashed where they are;
    equal replicas count once, so a replica that has drifted changes the digest.

    Returns:
        {layer_number as text or "embedding" or "output": sha256 hex}, the same on every rank.

    Collective:
        All ranks of the world.
    """
    with stage.settled():
        return _digests(topology, stage)


def _digests(topology: Topology, stage: MegatronStage) -> dict[str, str]:
    num_layers = stage.config.num_layers
    units = [str(n) for n in range(1, num_layers + 1)] + [EMBEDDING, OUTPUT]
    table = torch.zeros(len(units), 1 + _SHA_BYTES, dtype=torch.uint8)
    codec = stage.codec()
    for unit, named in _units(stage):
        row = table[units.index(unit)]
        row[0] = 1
        sha = hash_unit(named, codec)
        row[1:] = torch.frombuffer(bytearray(sha), dtype=torch.uint8)
    table = table.to(topology.device)
    tables = [torch.empty_like(table) for _ in range(topology.world_size)]
    dist.all_gather(tables, table)
    return {unit: _merge([t[i].cpu() for t in tables]) for i, unit in enumerate(units)}


def _merge(rows: list[torch.Tensor]) -> str:
    """Join the hashes of all ranks that hold a unit, each different one once, in rank order."""
    distinct = dict.fromkeys(bytes(row[1:].tolist()) for row in rows if row[0])
    return hashlib.sha256(b"".join(distinct)).hexdigest()


def _units(stage: MegatronStage) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    """The units of this rank in a fixed order, each with its tensors sorted by name."""
    for number, layer in sorted(stage.layers().items()):
        yield str(number), sorted([*layer.named_parameters(), *saved_buffers(layer)])
    ends: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in stage.tensors_outside_layers():
        unit = EMBEDDING if name.startswith("embedding.") else OUTPUT
        ends.setdefault(unit, []).append((name, tensor))
    for unit in (EMBEDDING, OUTPUT):
        if unit in ends:
            yield unit, sorted(ends[unit])


def hash_unit(named: Iterable[tuple[str, torch.Tensor]], codec: StateCodec) -> bytes:
    """Return the sha256 of parameters, each with its optimizer state, and of buffers.

    Collective:
        The data-parallel groups of parameters whose state is sharded.
    """
    sha = hashlib.sha256()
    for name, held in named:
        sha.update(name.encode())
        sha.update(_raw(held))
        if isinstance(held, torch.nn.Parameter):
            for key, tensor in _full_state(held, codec):
                sha.update(key.encode())
                sha.update(_raw(tensor))
    return sha.digest()


def _full_state(param: torch.nn.Parameter, codec: StateCodec) -> Iterator[tuple[str, torch.Tensor]]:
    """Master copy and optimizer state of a parameter, whole, by sorted key.

    Collective:
        The parameter's data-parallel group when its state is sharded.
    """
    state = codec.capture(param)
    if codec.is_sharded(param):
        group = data_parallel_group(param)
        tensors = {} if state is None else dict(state.tensors)
        main = tensors.pop(MAIN, None)
        if param.dtype != torch.float32:
            yield MAIN, assemble(param, main, state.shard if state else None, group)
        for key in codec.moment_keys:
            yield key, assemble(param, tensors.get(key), state.shard if state else None, group)
        yield "step", latest_step(tensors.get("step"), param.device, group)
    elif state is not None:
        if MAIN in state.tensors:
            yield MAIN, state.tensors[MAIN]
        for key in codec.moment_keys:
            yield key, state.tensors.get(key, torch.zeros(param.numel(), device=param.device))
        yield "step", latest_step(state.tensors.get("step"), param.device, None)


def _raw(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.cpu().numpy())
