"""The conformance suite of `Transport`: what arrives is what was sent, or both sides know why not.

Every scenario is a script for two ranks over one link; a hang is a failure of `run_ranks`.
"""

import os
import time

import pytest
import torch

from megatron_dynmo.errors import PeerGaveUp, PeerLost, TransportError
from megatron_dynmo.transport import Parcel, Transport
from tests.ranks import RanksFailed, run_ranks

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip


def make_transport(rank: int, **options) -> Transport:
    return Transport(torch.distributed.group.WORLD, (0, 1), torch.device("cpu"), **options)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def varied_tensors() -> dict[str, torch.Tensor]:
    """One tensor for each dtype, and each shape that is special."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=generator)
    tensors = {}
    for index, dtype in enumerate(DTYPES):
        size = torch.empty(0, dtype=dtype).element_size()
        flat = noise[: (3 * 5 + index) * size]
        flat = flat % 2 if dtype is torch.bool else flat
        tensors[f"dtype/{dtype}"] = flat.clone().view(dtype).clone()
    wide = torch.randn(60, 70, generator=generator)
    return tensors | {
        "scalar": torch.tensor(3.5),
        "scalar-int": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0),
        "empty-2d": torch.empty(0, 3, dtype=torch.bfloat16),
        "one-byte": torch.tensor([250], dtype=torch.uint8),
        "transposed": wide.t(),
        "strided": wide[::3, 1::7],
        "offset": torch.arange(9, dtype=torch.uint8)[1:],
        "parameter": torch.nn.Parameter(wide.clone()),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "several-chunks": torch.randn(1500, 3, generator=generator),
    }


def _exchange(rank: int, world_size: int) -> dict[int, list[str]]:
    return {size: _exchanged(rank, size) for size in (272, 1000, 2**20)}


def _exchanged(rank: int, chunk_bytes: int) -> list[str]:
    """Rank 0 sends, rank 1 fills half of the names in place, then the other way round."""
    transport = make_transport(rank, chunk_bytes=chunk_bytes)
    tensors = varied_tensors()
    values = {"scalars": {"lr": 0.1, "none": None}, "shard": [3, 5], "text": "ä"}
    problems: list[str] = []
    for sender in (0, 1):
        if rank == sender:
            before = {name: raw(tensor.detach()) for name, tensor in tensors.items()}
            parcel = Parcel("layer 3", dict(tensors), values)
            transport.send(parcel, 1 - rank)
            problems += [n for n, t in tensors.items() if raw(t.detach()) != before[n]]
            continue
        into = {
            name: torch.full(tensor.shape, 1, dtype=tensor.dtype)
            for name, tensor in list(tensors.items())[::2]
        }
        got = transport.receive("layer 3", sender, into, new=("",))
        assert got.label == "layer 3" and got.values == values
        assert list(got.tensors) == list(tensors)
        assert got.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
        for name, tensor in tensors.items():
            arrived = got.tensors[name]
            if name in into and arrived is not into[name]:
                problems.append(f"{name} not in place")
            if (arrived.dtype, arrived.shape) != (tensor.dtype, tensor.shape):
                problems.append(f"{name} became {arrived.dtype}{list(arrived.shape)}")
            if raw(arrived) != raw(tensor.detach()):
                problems.append(f"{name} has other bytes")
    return problems


def test_every_byte_arrives_whatever_the_dtype_shape_and_chunk():
    fine = {272: [], 1000: [], 2**20: []}
    assert run_ranks(_exchange, 2) == [fine, fine]


class _CountedRooms(Transport):
    """Remembers what it made room for."""

    def _room(self, chunks):
        room = super()._room(chunks)
        self.rooms = [*getattr(self, "rooms", []), room.numel()]
        return room


def test_extra_memory_is_two_messages_of_what_is_small():
    """Tensors of a message or more travel from and to where they lie."""
    transport = _CountedRooms(None, (0, 1), torch.device("cpu"), chunk_bytes=1000)
    large = torch.zeros(5, 1001)
    small = {f"small {n}": torch.zeros(n, dtype=torch.uint8) for n in range(1, 60)}
    messages = transport._messages({"large": large, **small})
    inside = [m for m in messages if m.room is None]
    assert sum(m.pieces[0].stop - m.pieces[0].offset for m in inside) == 20 * 1000
    (start,) = {m.buffer({"large": large}).untyped_storage().data_ptr() for m in inside}
    assert start == large.data_ptr()
    assert len(transport.rooms) == 2 and max(transport.rooms) <= 1000 + 16
    transport.rooms = []
    packed = transport._messages({"transposed": large.t()})
    assert len(packed) == 21 and all(m.room is not None for m in packed)
    assert transport.rooms == [1000, 1000]
    assert packed[0].room is not packed[1].room and packed[0].room is packed[2].room


def _all_kinds(rank: int, world_size: int) -> list[bool]:
    """Messages of real size: several of one tensor, and contiguous tensors filled by packing."""
    transport = make_transport(rank, chunk_bytes=3 * 2**20)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "many": torch.randn(2_700_001, generator=generator),
        "one": torch.randn(300_000, generator=generator),
        "transposed": torch.randn(1500, 900, generator=generator).t(),
        **{f"small {n}": torch.randn(n * 1000, generator=generator) for n in range(1, 90)},
    }
    if rank == 0:
        transport.send(Parcel("layer 3", tensors), 1)
        return []
    into = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    got = transport.receive("layer 3", 0, into)
    return [name for name, tensor in tensors.items() if not torch.equal(got.tensors[name], tensor)]


def test_messages_that_overlap_arrive_in_order():
    assert run_ranks(_all_kinds, 2) == [[], []]


MISFITS = {
    "wrong shape": (
        {"weight": torch.zeros(2, 3)},
        {"weight": torch.zeros(3, 2)},
        ["weight", "float32[2, 3]", "wanted float32[3, 2]"],
    ),
    "wrong dtype": (
        {"weight": torch.zeros(2)},
        {"weight": torch.zeros(2, dtype=torch.bfloat16)},
        ["weight", "float32[2]", "wanted bfloat16[2]"],
    ),
    "missing": (
        {"bias": torch.zeros(2)},
        {"bias": torch.zeros(2), "weight": torch.zeros(4, 5)},
        ["weight", "float32[4, 5]", "not sent"],
    ),
    "extra": (
        {"bias": torch.zeros(2), "weight": torch.zeros(4, 5)},
        {"bias": torch.zeros(2)},
        ["weight", "float32[4, 5]", "not wanted"],
    ),
}


def _misfits(rank: int, world_size: int) -> dict[str, str]:
    return {case: _misfit(rank, case) for case in MISFITS}


def _misfit(rank: int, case: str) -> str:
    """Offer what does not fit; then send something that does over the same link."""
    transport = make_transport(rank)
    sent, wanted, _ = MISFITS[case]
    good = torch.arange(5)
    if rank == 0:
        with pytest.raises(PeerGaveUp) as caught:
            transport.send(Parcel("layer 9", sent), 1)
        transport.send(Parcel("layer 10", {"good": good}), 1)
    else:
        untouched = {name: tensor.clone() for name, tensor in wanted.items()}
        with pytest.raises(TransportError) as caught:
            transport.receive("layer 9", 0, wanted)
        assert all(torch.equal(tensor, untouched[name]) for name, tensor in wanted.items())
        got = transport.receive("layer 10", 0, {"good": torch.zeros_like(good)})
        assert torch.equal(got.tensors["good"], good)
    assert not transport.has_lost_links
    return str(caught.value)


def test_what_does_not_fit_is_named_and_leaves_the_link_usable():
    sender_says, receiver_says = run_ranks(_misfits, 2)
    for case, (_, _, expected) in MISFITS.items():
        assert "pp_rank 1" in sender_says[case] and "layer 9" in sender_says[case]
        assert "pp_rank 0" in receiver_says[case] and "layer 9" in receiver_says[case]
        for words in expected:
            assert words in receiver_says[case], case


class _Unreadable(torch.Tensor):
    """A tensor that describes itself badly."""

    @property
    def shape(self):
        raise MemoryError("no room on the sender")


class _NoRoom(Transport):
    """Runs out of memory for what it is to receive."""

    def _room(self, chunks):
        raise torch.OutOfMemoryError("no room on the receiver")


# Who does what in place of a transfer, and which rank must hear of it.
FAILURES = {
    "sender raises": 1,
    "receiver raises": 0,
    "sender calls off": 1,
    "receiver calls off": 0,
    "both call off": None,
}


def _failures(rank: int, world_size: int) -> dict[str, str]:
    """One side fails before the first byte; the link then still carries a parcel."""
    heard = {}
    for case in FAILURES:
        transport = make_transport(rank)
        heard[case] = _as_sender(transport, case) if rank == 0 else _as_receiver(transport, case)
        if rank == 0:
            transport.send(Parcel("after", {"x": torch.ones(3)}), 1)
        else:
            got = transport.receive("after", 0, {"x": torch.zeros(3)})
            assert torch.equal(got.tensors["x"], torch.ones(3))
        assert not transport.has_lost_links
    return heard


def _as_sender(transport: Transport, case: str) -> str:
    if case in ("sender calls off", "both call off"):
        transport.call_off_sending("layer 1", 1)
        return ""
    weight, error = torch.zeros(2), PeerGaveUp
    if case == "sender raises":
        weight, error = weight.as_subclass(_Unreadable), MemoryError
    with pytest.raises(error) as caught:
        transport.send(Parcel("layer 1", {"w": weight}), 1)
    return str(caught.value)


def _as_receiver(transport: Transport, case: str) -> str:
    if case in ("receiver calls off", "both call off"):
        transport.call_off_receiving("layer 1", 0)
        return ""
    error = PeerGaveUp
    if case == "receiver raises":
        error = torch.OutOfMemoryError
        transport = _NoRoom(torch.distributed.group.WORLD, (0, 1), torch.device("cpu"))
    with pytest.raises(error) as caught:
        transport.receive("layer 1", 0, {}, new=("w",))
    return str(caught.value)


def test_a_failure_on_one_side_ends_the_wait_of_the_other():
    heard = run_ranks(_failures, 2, timeout_s=30)
    for case, informed in FAILURES.items():
        if informed is not None:
            assert "layer 1" in heard[informed][case], case
            assert f"pp_rank {1 - informed}" in heard[informed][case], case


class _Answer(Exception):
    """What a rank has to say although the run as a whole fails."""


def _no_answer(rank: int, world_size: int, peer_is: str) -> None:
    """The peer never answers; then even a second try ends, without waiting again."""
    if rank == 1:
        if peer_is == "dead":
            os._exit(0)
        time.sleep(600)  # the answer of rank 0 ends the run
    said = []
    for role in ("sender", "receiver"):
        transport = make_transport(rank, timeout_s=1)
        for _ in range(2):
            with pytest.raises(PeerLost) as caught:
                if role == "sender":
                    transport.send(Parcel("layer 4", {"w": torch.zeros(5)}), 1)
                else:
                    transport.receive("layer 4", 1, {"w": torch.zeros(5)})
            said.append(str(caught.value))
        assert transport.has_lost_links
    raise _Answer(said)


@pytest.mark.parametrize("peer_is", ["silent", "dead"])
def test_no_answer_is_an_error_and_no_hang(peer_is):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_no_answer, 2, peer_is, timeout_s=30)
    answer = failed.value.errors[0]
    assert "_Answer: " in answer, answer
    assert answer.count("layer 4") >= 4 and answer.count("was lost before") >= 2


class _RunsOut(Transport):
    """Has no memory left in the middle of an exchange."""

    def _send(self, tensor, peer):
        if tensor.dtype == torch.uint8:
            raise MemoryError
        super()._send(tensor, peer)


def _half_way(rank: int, world_size: int) -> tuple[str, bool]:
    """The sender's word has gone out and its manifest has not: nothing may follow on that link."""
    if rank == 0:
        transport = _RunsOut(torch.distributed.group.WORLD, (0, 1), torch.device("cpu"))
    else:
        transport = make_transport(rank, timeout_s=1)
    with pytest.raises(PeerLost) as caught:
        if rank == 0:
            transport.send(Parcel("layer 2", {"w": torch.zeros(5)}), 1)
        else:
            transport.receive("layer 2", 0, {"w": torch.zeros(5)})
    return str(caught.value), transport.has_lost_links


def test_an_exchange_that_fails_half_way_ends_the_link():
    sender, receiver = run_ranks(_half_way, 2, timeout_s=30)
    assert sender == ("sending layer 2 to pp_rank 1 failed: MemoryError", True)
    assert receiver[0].startswith("receiving layer 2 from pp_rank 0 failed: ") and receiver[1]


def _out_of_step(rank: int, world_size: int) -> None:
    """Words that are not of the protocol end the link; they are never taken for a size."""
    transport = make_transport(rank)
    if rank == 0:
        torch.distributed.send(torch.tensor([12345, 6]), 1)
        return
    with pytest.raises(PeerLost, match="out of step"):
        transport.receive("layer 1", 0, {})
    assert transport.has_lost_links


def test_foreign_words_on_the_link_are_noticed():
    run_ranks(_out_of_step, 2)


def _crossing_moves(rank: int, world_size: int) -> bool:
    """Three ranks hand parcels round in both directions, each in ascending order of layers."""
    transport = Transport(
        torch.distributed.group.WORLD, (0, 1, 2), torch.device("cpu"), chunk_bytes=64
    )
    moves = [(1, 0, 1), (2, 1, 0), (3, 2, 0), (4, 0, 2), (5, 1, 2), (6, 2, 1)]
    good = True
    for layer, source, target in moves:
        expected = torch.full((50,), layer)
        if rank == source:
            transport.send(Parcel(f"layer {layer}", {"w": expected}), target)
        elif rank == target:
            into = {"w": torch.zeros(50, dtype=torch.int64)}
            got = transport.receive(f"layer {layer}", source, into)
            good &= torch.equal(got.tensors["w"], expected)
    return good


def test_crossing_moves_in_one_order_do_not_lock_up():
    assert run_ranks(_crossing_moves, 3) == [True, True, True]
