"""Carries named tensors between two ranks of a group, as tensors and without pickle.

Tier: torch, not Megatron. One parcel is one layer's state: a header of two numbers, a JSON
manifest that names every tensor with dtype and shape, then the bytes, coalesced into chunks.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
import torch.distributed as dist

from megatron_dynmo.errors import TransportError

CHUNK_BYTES = 64 * 2**20
_ALIGN_BYTES = 16  # every tensor starts aligned in its chunk, so that it can be viewed in place


@dataclass
class Parcel:
    """Named tensors and plain values that travel together.

    Attributes:
        label: what it is, for error messages.
        tensors: name -> tensor; a sender's tensors are only read.
        values: JSON-able facts that travel in the manifest.
    """

    label: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Transport:
    """Point-to-point parcels over one process group (gloo or NCCL).

    Args:
        group: group whose members exchange parcels; belongs to the caller.
        global_ranks: global rank of each member.
        device: where the group's collectives take their tensors.
        timeout_s: limit of one step; a peer that does not answer in it raises TransportError.
        chunk_bytes: size of a message; the extra memory of a transfer is two chunks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        global_ranks: Sequence[int],
        device: torch.device,
        *,
        timeout_s: float = 600.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._group = group
        self._ranks = tuple(global_ranks)
        self._device = device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._chunk_bytes = chunk_bytes

    def send(self, parcel: Parcel, peer: int) -> None:
        """Send a parcel to group rank `peer`, which must call `receive` for it.

        Collective:
            This rank and the peer, in the order of the plan on both sides.

        Raises:
            TransportError: The peer failed or did not answer in time.
        """
        manifest = orjson.dumps({"tensors": _describe(parcel.tensors), "values": parcel.values})
        with self._step(f"sending {parcel.label} to pp_rank {peer}"):
            header = torch.tensor([len(manifest), parcel.num_bytes], dtype=torch.int64)
            self._send(header, peer)
            self._send(torch.frombuffer(bytearray(manifest), dtype=torch.uint8), peer)
            for chunk in _chunks(parcel.tensors, self._chunk_bytes):
                packed = torch.zeros(chunk[-1].end, dtype=torch.uint8, device=self._device)
                for piece in chunk:
                    source = _bytes_of(parcel.tensors[piece.name])
                    packed[piece.start : piece.end].copy_(source[piece.offset : piece.stop])
                self._send(packed, peer)

    def receive(self, label: str, peer: int, into: Mapping[str, torch.Tensor]) -> Parcel:
        """Receive a parcel from group rank `peer`.

        Args:
            label: what is expected, for error messages.
            peer: group rank of the sender.
            into: name -> tensor to fill in place, whose dtype and shape must be the sender's.
                Names the sender has beyond these arrive in new tensors.

        Returns:
            A parcel with every tensor the sender named, owned by the caller.

        Collective:
            This rank and the peer, in the order of the plan on both sides.

        Raises:
            TransportError: The peer failed, did not answer in time, or sent other tensors than
                `into` asks for; the text names tensor, dtype and shape found and wanted.
        """
        with self._step(f"receiving {label} from pp_rank {peer}"):
            header = self._receive(torch.empty(2, dtype=torch.int64, device=self._device), peer)
            num_manifest, num_bytes = header.tolist()
            raw = self._receive(
                torch.empty(num_manifest, dtype=torch.uint8, device=self._device), peer
            )
            manifest = orjson.loads(raw.cpu().numpy().tobytes())
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
                if name not in into
                else into[name]
                for name, dtype, shape in manifest["tensors"]
            }
            problem = _mismatch(manifest["tensors"], into)
            assert all(t.is_contiguous() for t in into.values())
            # The bytes are taken off the wire even when they do not fit: the peer is sending
            # them, and a half-read message would be taken for the start of the next one.
            for chunk in _chunks(_sized(manifest["tensors"]), self._chunk_bytes):
                packed = self._receive(
                    torch.empty(chunk[-1].end, dtype=torch.uint8, device=self._device), peer
                )
                if problem is None:
                    for piece in chunk:
                        target = _bytes_of(tensors[piece.name])
                        target[piece.offset : piece.stop].copy_(packed[piece.start : piece.end])
        if problem is not None:
            raise TransportError(f"{label} from pp_rank {peer} does not fit: {problem}")
        parcel = Parcel(label, tensors, manifest["values"])
        assert parcel.num_bytes == num_bytes, (parcel.num_bytes, num_bytes)
        return parcel

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        work = dist.isend(tensor.to(self._device), self._ranks[peer], group=self._group)
        self._wait(work)

    def _receive(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        work = dist.irecv(tensor, self._ranks[peer], group=self._group)
        self._wait(work)
        return tensor

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is not in the group"
        if self._device.type == "cuda":
            work.wait()  # NCCL orders on the stream; its own watchdog bounds the time
        else:
            work.wait(self._timeout)

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"{what} failed: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class _Piece:
    """Bytes [offset, stop) of a tensor at [start, end) of a chunk."""

    name: str
    offset: int
    stop: int
    start: int
    end: int


def _describe(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    return [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]


def _sized(described: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Tensors without storage that have the described sizes."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in described
    }


def _chunks(tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> Iterator[list[_Piece]]:
    """Cut the tensors, in order, into messages of at most `chunk_bytes`; the same on both sides."""
    chunk: list[_Piece] = []
    used = 0
    for name, tensor in tensors.items():
        total, offset = tensor.numel() * tensor.element_size(), 0
        while offset < total:
            if used >= chunk_bytes:
                yield chunk
                chunk, used = [], 0
            size = min(total - offset, chunk_bytes - used)
            chunk.append(_Piece(name, offset, offset + size, used, used + size))
            offset += size
            used += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    if chunk:
        yield chunk


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a tensor (of a copy when it is not contiguous)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _mismatch(described: Sequence[Any], into: Mapping[str, torch.Tensor]) -> str | None:
    """Say how what was sent differs from what is wanted; None when it fits."""
    sent = {name: (dtype, tuple(shape)) for name, dtype, shape in described}
    wanted = {name: (dtype, tuple(shape)) for name, dtype, shape in _describe(into)}
    for name, want in wanted.items():
        if name not in sent:
            return f"{name} {want[0]}{list(want[1])} was not sent"
        if sent[name] != want:
            got = sent[name]
            return f"{name} is {got[0]}{list(got[1])}, wanted {want[0]}{list(want[1])}"
    return None
