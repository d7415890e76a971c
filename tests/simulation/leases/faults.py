"""Faults of leases, and of what they end, that a simulated world must find.

They replace private steps of the server, as no call of its clients can plant such a fault.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.layers.batch_norm.registry import LayerRegistry
from gradserve_server.resources.lifetimes import SHARED, ClientLeases, Lease, LeaseQueue
from gradserve_server.rpc.tensors.messages import OutgoingTensors
from gradserve_server.runtime.event_loop import ServiceClock
from gradserve_server.tensors.held import HeldTensors
from gradserve_server.tensors.store import TensorStore
from tests.simulation.planting import Fault


def use_without_renewing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "renew", lambda self: None)


def end_amid_a_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "end", lambda self, now: self._end)


def lose_renewed_leases(patch: pytest.MonkeyPatch) -> None:
    def push(self: Any, lease: Any, now: float) -> None:
        if lease not in known:
            known.add(lease)
            real(self, lease, now)

    known: set[Any] = set()
    real: Any = LeaseQueue._push
    patch.setattr(LeaseQueue, "_push", push)


def count_the_time_while_suspended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServiceClock, "__call__", lambda self: self._monotonic())


def begin_no_leases_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    def restore_accumulator(self: Any, key: Any, spec: Any, lifetime: Any, *rest: Any, **options: Any) -> Any:
        return accumulators(self, key, spec, SHARED, *rest, **options)

    def restore_layer(self: Any, key: Any, config: Any, lifetime: Any, **options: Any) -> Any:
        return layers(self, key, config, SHARED, **options)

    accumulators: Any = AccumulatorRegistry.restore
    layers: Any = LayerRegistry.restore
    patch.setattr(AccumulatorRegistry, "restore", restore_accumulator)
    patch.setattr(LayerRegistry, "restore", restore_layer)


def keep_what_a_closed_client_had(patch: pytest.MonkeyPatch) -> None:
    async def end(self: Any, client_id: str) -> int:
        client = self._clients.get(client_id)
        if client is not None:
            self._forget(client)
        return 0

    patch.setattr(ClientLeases, "end", end)


def leak_handles_of_a_cancelled_delivery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutgoingTensors, "__exit__", lambda self, *exception: self.room.settle())


def keep_the_memory_of_a_broken_upload(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def reserved(self: Any, *args: Any) -> Iterator[Any]:
        with real(self, *args) as places:
            try:
                yield places
            except BaseException:
                places.room.another().host.grow(places.room.host.used)
                raise

    real: Any = TensorStore._reserved
    patch.setattr(TensorStore, "_reserved", reserved)


def take_over_what_others_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldTensors, "exclusive", property(lambda self: self._release and bool(self._entries)))


def hide_for_ever_what_a_failed_call_wanted_to_release(patch: pytest.MonkeyPatch) -> None:
    def show(self: Any, entry: Any) -> None:
        if not entry.users and entry.serial not in shown:
            shown.add(entry.serial)
            real(self, entry)

    shown: set[int] = set()
    real: Any = TensorStore._show
    patch.setattr(TensorStore, "_show", show)


FAULTS: dict[str, Fault] = {
    "a use does not renew leases": use_without_renewing,
    "leases end amid a use": end_amid_a_use,
    "renewed leases never end": lose_renewed_leases,
    "leases end while the server is suspended": count_the_time_while_suspended,
    "leases do not begin again after a restart": begin_no_leases_after_a_restart,
    "a closed client keeps what it had": keep_what_a_closed_client_had,
    "a cancelled delivery leaves handles": leak_handles_of_a_cancelled_delivery,
    "a broken upload keeps its memory": keep_the_memory_of_a_broken_upload,
    "a sum takes over what others read": take_over_what_others_read,
    "tensors stay hidden after a failed call": hide_for_ever_what_a_failed_call_wanted_to_release,
}
