"""Carries named tensors between two ranks of a group, as tensors and without pickle.

Tier: torch, not Megatron. One parcel is one layer's state. The sender offers it (a word and a
JSON manifest that names every tensor with dtype and shape), the receiver makes room and answers,
then the bytes go: large tensors from and to where they lie, small ones coalesced. Several messages
are under way at a time, so that the next one is packed while one is sent, and the last one unpacked
while another arrives. Either side can call the exchange off at its first word, so a failure on one
side ends the other side's wait at once and leaves the link in order.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
import torch.distributed as dist

from megatron_dynmo.errors import PeerGaveUp, PeerLost, TransportError

CHUNK_BYTES = 16 * 2**20
# Copying this much into a message costs more than a message of its own.
_ALONE_BYTES = 2**20
# Messages under way at a time: of those that lie in their tensors, and with one in a room.
_UNDER_WAY, _UNDER_WAY_IN_ROOMS = 8, 2
_ALIGN_BYTES = 16  # every tensor starts aligned in its chunk: unaligned copies are slow
# First words of both sides; odd numbers, so that a link out of step is noticed.
_OFFERED, _ACCEPTED, _CALLED_OFF = 0x6F66666572, 0x616363657074, 0x63616C6C6F6666

type Described = tuple[str, str, list[int]]
"""Name, dtype and shape of a tensor."""


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
        timeout_s: limit of one step; a peer that does not answer in it raises PeerLost.
        tag: tells the messages of this transport from others that use the group at the same time;
            NCCL knows no tags.
        chunk_bytes: limit of a message. The extra memory of a transfer on either side is at most
            two messages of small tensors; tensors of 1 MiB and more take none, unless they are
            not contiguous (then a copy of one of them) or lie on another device (then they go
            through the same two rooms).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        global_ranks: Sequence[int],
        device: torch.device,
        *,
        timeout_s: float = 600.0,
        tag: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._group = group
        self._tag = tag
        self._ranks = tuple(global_ranks)
        self._device = device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._chunk_bytes = chunk_bytes
        self._lost: set[int] = set()

    @property
    def has_lost_links(self) -> bool:
        """Whether a link of this rank has failed; nothing goes over it any more."""
        return bool(self._lost)

    def send(self, parcel: Parcel, peer: int) -> None:
        """Send a parcel to group rank `peer`, which must call `receive` for it.

        Collective:
            This rank and the peer, in the order of the plan on both sides.

        Raises:
            PeerGaveUp: The peer does not take it.
            PeerLost: The link failed, or the peer did not answer in time.
        """
        what = f"sending {parcel.label} to pp_rank {peer}"
        try:
            manifest = orjson.dumps({"tensors": describe(parcel.tensors), "values": parcel.values})
            messages = self._messages(parcel.tensors)
        except Exception:
            with contextlib.suppress(TransportError):
                self.call_off_sending(parcel.label, peer)
            raise
        with self._link(what, peer):
            self._say(peer, _OFFERED, len(manifest))
            self._send(torch.frombuffer(bytearray(manifest), dtype=torch.uint8), peer)
            if self._hear(peer)[0] == _CALLED_OFF:
                raise PeerGaveUp(f"pp_rank {peer} did not take {parcel.label}")
            under_way: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
            for message in messages:
                while len(under_way) >= message.max_under_way:
                    self._wait(under_way.popleft()[0])
                filled = message.packed(parcel.tensors)
                under_way.append((self._start_sending(filled, peer), filled))
            while under_way:
                self._wait(under_way.popleft()[0])

    def receive(
        self,
        label: str,
        peer: int,
        into: Mapping[str, torch.Tensor],
        new: tuple[str, ...] = (),
    ) -> Parcel:
        """Receive a parcel from group rank `peer`.

        Args:
            label: what is expected, for error messages.
            peer: group rank of the sender.
            into: name -> contiguous tensor to fill in place, whose dtype and shape must be the
                sender's.
            new: first letters of names that may come beside these; they arrive in new tensors.

        Returns:
            A parcel with every tensor the sender named, owned by the caller.

        Collective:
            This rank and the peer, in the order of the plan on both sides.

        Raises:
            TransportError: The peer offers other tensors than those asked for; the text names
                tensor, dtype and shape found and wanted. No byte was sent.
            PeerGaveUp: The peer called it off.
            PeerLost: The link failed, or the peer did not answer in time.
        """
        what = f"receiving {label} from pp_rank {peer}"
        with self._link(what, peer):
            offer = self._hear_offer(label, peer)
        try:
            described, values = offer["tensors"], offer["values"]
            if problem := _mismatch(described, into, new):
                raise TransportError(f"{label} from pp_rank {peer} does not fit: {problem}")
            assert all(tensor.is_contiguous() for tensor in into.values())
            # In the sender's order, which is that of the messages.
            made = self.allocate(row for row in described if row[0] not in into)
            tensors = {name: into[name] if name in into else made[name] for name, *_ in described}
            parcel = Parcel(label, tensors, values)
            messages = self._messages(tensors)
        except Exception:
            with contextlib.suppress(TransportError), self._link(what, peer):
                self._say(peer, _CALLED_OFF)
            raise
        with self._link(what, peer):
            self._say(peer, _ACCEPTED)
            under_way: deque[tuple[dist.Work | None, _Message, torch.Tensor]] = deque()
            for message in messages:
                while len(under_way) >= message.max_under_way:
                    self._take(*under_way.popleft(), parcel)
                arriving = message.buffer(tensors)
                under_way.append((self._start_receiving(arriving, peer), message, arriving))
            while under_way:
                self._take(*under_way.popleft(), parcel)
        return parcel

    def allocate(self, described: Iterable[Described]) -> dict[str, torch.Tensor]:
        """New tensors, not filled, for what `describe` told of others; they are the caller's."""
        return {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for name, dtype, shape in described
        }

    def _take(
        self, work: dist.Work | None, message: _Message, arrived: torch.Tensor, parcel: Parcel
    ) -> None:
        """Wait for a message and put its bytes where they belong."""
        self._wait(work)
        message.unpack(arrived, parcel.tensors)

    def call_off_sending(self, label: str, peer: int) -> None:
        """Take the place of `send` when this side has failed; the peer's `receive` ends at once.

        Raises:
            PeerLost: The link failed, or the peer did not answer in time.
        """
        with self._link(f"calling off {label} to pp_rank {peer}", peer):
            self._say(peer, _CALLED_OFF)

    def call_off_receiving(self, label: str, peer: int) -> None:
        """Take the place of `receive` when this side has failed; the peer's `send` ends at once.

        Raises:
            PeerLost: The link failed, or the peer did not answer in time.
        """
        with (
            contextlib.suppress(PeerGaveUp),
            self._link(f"calling off {label} from pp_rank {peer}", peer),
        ):
            self._hear_offer(label, peer)
            self._say(peer, _CALLED_OFF)

    def _hear_offer(self, label: str, peer: int) -> dict[str, Any]:
        """The sender's manifest."""
        word, num_manifest = self._hear(peer)
        if word == _CALLED_OFF:
            raise PeerGaveUp(f"pp_rank {peer} called off {label}")
        raw = self._receive(torch.empty(num_manifest, dtype=torch.uint8, device=self._device), peer)
        offer: dict[str, Any] = orjson.loads(raw.cpu().numpy().tobytes())
        return offer

    def _say(self, peer: int, word: int, size: int = 0) -> None:
        """Send a word, and the size of what follows it."""
        self._send(torch.tensor([word, size], dtype=torch.int64), peer)

    def _hear(self, peer: int) -> list[int]:
        """Receive a word, and the size of what follows it."""
        heard = self._receive(torch.empty(2, dtype=torch.int64, device=self._device), peer).tolist()
        if heard[0] not in (_OFFERED, _ACCEPTED, _CALLED_OFF):
            raise RuntimeError(f"the link is out of step: {heard}")
        return heard

    def _messages(self, tensors: Mapping[str, torch.Tensor]) -> list[_Message]:
        """What the tensors travel in, the same on both sides but for the rooms."""
        chunks = list(_chunks(tensors, self._chunk_bytes))
        packed = [chunk for chunk in chunks if not self._goes_alone(chunk, tensors)]
        room = self._room(packed)
        rooms = [room, self._room(packed) if len(packed) > 1 else room]
        return [
            _Message(chunk, None if self._goes_alone(chunk, tensors) else rooms[number % 2])
            for number, chunk in enumerate(chunks)
        ]

    def _goes_alone(self, chunk: Sequence[_Piece], tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a message can be sent from, or received into, the tensor itself."""
        tensor = tensors[chunk[0].name]
        return len(chunk) == 1 and tensor.is_contiguous() and tensor.device == self._device

    def _room(self, chunks: Sequence[Sequence[_Piece]]) -> torch.Tensor:
        """Memory for the largest of some chunks."""
        size = max((chunk[-1].end for chunk in chunks), default=0)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        self._wait(self._start_sending(tensor.to(self._device), peer))

    def _receive(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        self._wait(self._start_receiving(tensor, peer))
        return tensor

    def _start_sending(self, tensor: torch.Tensor, peer: int) -> dist.Work | None:
        return dist.isend(tensor, self._ranks[peer], group=self._group, tag=self._tag)

    def _start_receiving(self, tensor: torch.Tensor, peer: int) -> dist.Work | None:
        return dist.irecv(tensor, self._ranks[peer], group=self._group, tag=self._tag)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is not in the group"
        if self._device.type == "cuda":
            work.wait()  # NCCL orders on the stream; its own watchdog bounds the time
        else:
            work.wait(self._timeout)

    @contextlib.contextmanager
    def _link(self, what: str, peer: int) -> Iterator[None]:
        """Around messages: a failure is the end of the link, whose messages may be half read."""
        if peer in self._lost:
            raise PeerLost(f"{what} failed: the link to pp_rank {peer} was lost before")
        try:
            yield
        except TransportError:
            raise
        except Exception as error:
            self._lost.add(peer)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise PeerLost(f"{what} failed: {reason}") from error


@dataclass(frozen=True)
class _Piece:
    """Bytes [offset, stop) of a tensor at [start, end) of a chunk."""

    name: str
    offset: int
    stop: int
    start: int
    end: int


@dataclass(frozen=True)
class _Message:
    """One message: pieces, and the room they are packed in; None when a tensor's own bytes go."""

    pieces: list[_Piece]
    room: torch.Tensor | None

    @property
    def max_under_way(self) -> int:
        """Messages that may be under way, this one included, if nothing is to be overwritten."""
        return _UNDER_WAY if self.room is None else _UNDER_WAY_IN_ROOMS

    def packed(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The bytes to send."""
        buffer = self.buffer(tensors)
        if self.room is not None:
            for piece in self.pieces:
                source = _bytes_of(tensors[piece.name])
                buffer[piece.start : piece.end].copy_(source[piece.offset : piece.stop])
        return buffer

    def buffer(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Where the bytes of the message lie while they travel."""
        if self.room is not None:
            return self.room[: self.pieces[-1].end]
        (piece,) = self.pieces
        return _bytes_of(tensors[piece.name])[piece.offset : piece.stop]

    def unpack(self, arrived: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put received bytes into the tensors; nothing to do where they arrived in one."""
        if self.room is not None:
            for piece in self.pieces:
                target = _bytes_of(tensors[piece.name])
                target[piece.offset : piece.stop].copy_(arrived[piece.start : piece.end])


def describe(tensors: Mapping[str, torch.Tensor]) -> list[Described]:
    """Name, dtype and shape of tensors."""
    return [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]


def _chunks(tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> Iterator[list[_Piece]]:
    """Cut the tensors into messages of at most `chunk_bytes`; the same on both sides.

    Pieces of large tensors come first and each by itself, then everything small, in order.
    """
    alone_bytes = min(_ALONE_BYTES, chunk_bytes)
    small = []
    for name, tensor in tensors.items():
        total, offset = tensor.numel() * tensor.element_size(), 0
        while total - offset >= alone_bytes:
            size = min(total - offset, chunk_bytes)
            yield [_Piece(name, offset, offset + size, 0, size)]
            offset += size
        small.append((name, offset, total))
    chunk: list[_Piece] = []
    used = 0
    for name, offset, total in small:
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


def _mismatch(
    described: Sequence[Any], into: Mapping[str, torch.Tensor], new: tuple[str, ...]
) -> str | None:
    """Say how what is offered differs from what is wanted; None when it fits."""
    offered = {name: f"{dtype}{list(shape)}" for name, dtype, shape in described}
    wanted = {name: f"{dtype}{list(shape)}" for name, dtype, shape in describe(into)}
    for name, want in wanted.items():
        if name not in offered:
            return f"{name}, wanted as {want}, was not sent"
        if offered[name] != want:
            return f"{name} is {offered[name]}, wanted {want}"
    for name, found in offered.items():
        if name not in wanted and not name.startswith(new):
            return f"{name} {found} is not wanted"
    return None
