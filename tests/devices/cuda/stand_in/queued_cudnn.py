"""A cuDNN that queues its work on streams."""

import copy
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.devices.cuda.cudnn.fake_cudnn import EXECUTION_FAILED, FakeCudnn
from tests.devices.cuda.stand_in.gpu.errors import CUDARuntimeError
from tests.devices.cuda.stand_in.gpu.faults import Fault
from tests.devices.cuda.stand_in.gpu.machine import Machine
from tests.devices.cuda.stand_in.gpu.ranges import Access

_ALLOCATION_FAILED = 4004
_RESTORE = "cudnnRestoreDropoutDescriptor"
_HANDLES = {"cudnnSetDropoutDescriptor": 1, "cudnnRestoreDropoutDescriptor": 1}
"""The places of the handle among the arguments, where it is not the first."""
_READS = {
    "cudnnRNNForward": (5, 9, 12, 15),
    "cudnnRNNBackwardData_v8": (4, 5, 9, 10, 13, 14, 17),
    "cudnnRNNBackwardWeights_v8": (5, 7, 9),
    "cudnnSetDropoutDescriptor": (),
}
_WRITES = {
    "cudnnRNNForward": (7, 10, 13, 17, 19),
    "cudnnRNNBackwardData_v8": (7, 11, 15, 19, 21),
    "cudnnRNNBackwardWeights_v8": (11, 13, 15),
    "cudnnSetDropoutDescriptor": (3,),
}
"""The places of addresses among the arguments of what is queued: of memory that is read, and that is written."""


class QueuedCudnn(FakeCudnn):
    """The library on some GPUs. What it computes is queued on the stream of its handle.

    A handle is for the thread that made it, and takes memory. Whatever the library does not like is a fault.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.RLock()
        super().__init__(is_shuffled=True)
        self._first_id = time.monotonic_ns()
        self._ids = itertools.count(self._first_id)

    def _checked(self, name: str) -> Callable[..., int]:
        call = super()._checked(name)

        def safe(*arguments: Any) -> int:
            try:
                return self._call(name, call, arguments)
            except (Fault, CUDARuntimeError):
                return EXECUTION_FAILED

        return safe

    def _call(self, name: str, call: Callable[..., int], arguments: tuple[Any, ...]) -> int:
        if self._machine.is_closed:
            return 0
        if name.startswith("cudnnDestroy") and arguments[0] < self._first_id:
            return 0  # of a server that was before, which the collector of garbage has found only now
        if name == "cudnnCreate":
            return self._create(call, *arguments)
        if name == "cudnnSetDropoutDescriptor":
            return self._set_dropout(call, arguments)
        return self._queue(name, arguments) if name in _READS else self._at_once(name, call, arguments)

    def _create(self, call: Callable[..., int], new: Any) -> int:
        self._machine.enter()
        if not self._machine.take_outside("cudnn", self._machine.settings.cudnn_bytes):
            return _ALLOCATION_FAILED
        status = self._at_once("cudnnCreate", call, (new,))
        self.things[new[0]].values["thread"] = threading.get_ident()
        return status

    def _at_once(self, name: str, call: Callable[..., int], arguments: tuple[Any, ...]) -> int:
        self._check_thread(name, arguments)
        with self._lock:
            known = len(self.faults)
            status = call(*arguments)
            for fault in self.faults[known:]:
                self._machine.fault(f"{name}: {type(fault).__name__}: {fault}")
        return status

    def _set_dropout(self, call: Callable[..., int], arguments: tuple[Any, ...]) -> int:
        """Describes the dropout at once, and queues the beginning of the generator."""
        it, handle, dropout, states, num_bytes, seed = arguments
        if states:
            self._queue("cudnnSetDropoutDescriptor", arguments)
            return int(getattr(self, _RESTORE)(it, handle, dropout, states, num_bytes, seed))
        return self._at_once("cudnnSetDropoutDescriptor", call, arguments)

    def _queue(self, name: str, arguments: tuple[Any, ...]) -> int:
        self._check_thread(name, arguments)
        handle = arguments[_HANDLES.get(name, 0)]
        with self._lock:
            clone = copy.copy(self)
            clone.things = copy.deepcopy(self.things)
            queue = self._machine.queue(self._values(handle, "")["stream"])
            self.calls.append((name, arguments))

        def run() -> None:
            with np.errstate(all="ignore"):
                getattr(clone, "_" + name.removeprefix("cudnn"))(*arguments)

        self._machine.issue(queue, name, self._accesses(name, arguments), run)
        return 0

    def _accesses(self, name: str, arguments: tuple[Any, ...]) -> list[Access]:
        """Returns what is used: from each address to the end of its block."""
        used = [(arguments[place], False) for place in _READS[name]]
        used += [(arguments[place], True) for place in _WRITES[name]]
        return [self._machine.from_address(address, writes=writes) for address, writes in used if address]

    def _check_thread(self, name: str, arguments: tuple[Any, ...]) -> None:
        place = _HANDLES.get(name, 0)
        address = arguments[place] if len(arguments) > place else None
        handle = self.things.get(address) if isinstance(address, int) else None
        if handle is None or handle.kind or name == "cudnnDestroy":
            return
        if handle.values["thread"] != threading.get_ident():
            raise self._machine.fault(f"{name} with the handle of another thread")
