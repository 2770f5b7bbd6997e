"""State that follows its layer while the next iteration computes.

Tier: torch, not Megatron. From one optimizer step to the next, moments and master copies are not
read and do not change. So after a move only weights have to be there for training to go on: the
rest travels beside the forward and backward passes and must be there, and be whole, before the
optimizer steps. The sender holds it until then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dynmo.errors import MigrationError, TransportError
from megatron_dynmo.plan import LayerMove
from megatron_dynmo.transport import Parcel, Transport

logger = logging.getLogger(__name__)


@dataclass
class LateParcel:
    """What one layer left behind, on either side.

    Attributes:
        move: the layer and its way.
        parcel: the sender's tensors, which are only read; or the receiver's, which are filled.
            Its values are the sender's: the checksum from before the move.
        held: of a receiver, the state as the rebuilt optimizer holds it.
    """

    move: LayerMove
    parcel: Parcel
    held: Parcel | None = None

    def hold(self, held: Parcel) -> None:
        """Note what the optimizer holds.

        Raises:
            MigrationError: It has copied what is not there yet.
        """
        for name, tensor in self.parcel.tensors.items():
            if held.tensors[name].data_ptr() != tensor.data_ptr():
                raise MigrationError(f"the optimizer holds a copy of {name} of {held.label}")
        self.held = held


class Flight:
    """Late parcels of one move, under way in a thread of their own.

    Args:
        pp_rank: this rank's pipeline rank.
        transport: for these parcels only, since other threads use the others.
        parcels: in the order of the plan, which is the same on both sides.
        fingerprint: checksum of a parcel; called in the thread.

    Attributes:
        duration_ms: how long they took; 0 until they have.
    """

    def __init__(
        self,
        pp_rank: int,
        transport: Transport,
        parcels: list[LateParcel],
        fingerprint: Callable[[Parcel], int],
    ) -> None:
        self._pp_rank = pp_rank
        self._transport = transport
        self._parcels = parcels
        self._fingerprint = fingerprint
        self.duration_ms = 0.0
        # Until the thread says that all is well, nothing is.
        self._error: Exception | None = TransportError("the thread of what follows has died")
        # A daemon: a rank that fails in its iteration must end, and with it the others' wait.
        self._thread = threading.Thread(target=self._fly, name="dynmo-late-state", daemon=True)
        self._thread.start()

    def land(self) -> None:
        """Wait until all has arrived here, or left.

        Raises:
            TransportError: A link failed.
            MigrationError: What the optimizer holds is not what was sent.
        """
        self._thread.join()
        self._parcels.clear()
        if self._error is not None:
            raise self._error

    def _fly(self) -> None:
        started = time.perf_counter()
        failure: Exception | None = None
        with torch.no_grad():  # the mode belongs to a thread
            for late in self._parcels:
                try:
                    if failure is None:
                        self._carry(late)
                    else:
                        self._call_off(late)
                except Exception as error:
                    # Said at once: the iteration may fail of it before anybody lands.
                    logger.error("%s: %s", late.parcel.label, error)
                    failure = failure or error
        self.duration_ms = (time.perf_counter() - started) * 1e3
        self._error = failure

    def _carry(self, late: LateParcel) -> None:
        move, parcel = late.move, late.parcel
        if move.src_pp_rank == self._pp_rank:
            self._transport.send(parcel, move.dst_pp_rank)
            return
        assert late.held is not None
        received = self._transport.receive(parcel.label, move.src_pp_rank, parcel.tensors)
        if self._fingerprint(late.held) != received.values["fingerprint"]:
            raise MigrationError(f"{parcel.label} changed on its way")

    def _call_off(self, late: LateParcel) -> None:
        """Tell the other rank, which would wait for it."""
        label = late.parcel.label
        with contextlib.suppress(TransportError):
            if late.move.src_pp_rank == self._pp_rank:
                self._transport.call_off_sending(label, late.move.dst_pp_rank)
            else:
                self._transport.call_off_receiving(label, late.move.src_pp_rank)
