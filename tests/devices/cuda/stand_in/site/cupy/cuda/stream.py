"""Streams and events."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Self

from .._machine import MACHINE
from . import runtime


class _ThreadLocal(threading.local):
    """The streams of a thread: the current one of each GPU, and those of the blocks in which it is."""

    def __init__(self) -> None:
        gpus = range(MACHINE.settings.num_gpus)
        self.current: list[_BaseStream] = [Stream.null for _ in gpus]
        self.stacks: list[list[_BaseStream]] = [[Stream.null] for _ in gpus]
        self.devices: list[int] = []


class Event:
    """A point in a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = 0
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        flags = (block and 1) | (disable_timing and 2) | (interprocess and 4)
        self.ptr = runtime.eventCreateWithFlags(flags)

    def __del__(self) -> None:
        if self.ptr:
            runtime.eventDestroy(self.ptr)

    @property
    def done(self) -> bool:
        return runtime.eventQuery(self.ptr) == 0

    def record(self, stream: "_BaseStream | None" = None) -> None:
        runtime.eventRecord(self.ptr, (get_current_stream() if stream is None else stream).ptr)

    def synchronize(self) -> None:
        runtime.eventSynchronize(self.ptr)


class _BaseStream:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> Self:
        device = self._check_device()
        users = MACHINE.queue(self.ptr).users
        thread = threading.get_ident()
        if self.ptr not in (0, 1) and users - {thread}:
            raise MACHINE.fault("a stream is current in two threads at once")
        users.add(thread)
        local = _local()
        local.stacks[device].append(self)
        local.devices.append(device)
        local.current[device] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        local = _local()
        device = local.devices.pop()
        stack = local.stacks[device]
        left = stack.pop()
        if left is not self:
            raise MACHINE.fault("a stream's block is left while another one's inside it is not")
        if self not in stack and (queue := MACHINE.scheduler.queues.get(self.ptr)) is not None:
            queue.users.discard(threading.get_ident())
        local.current[device] = stack[-1]

    def use(self) -> Self:
        _local().current[self._check_device()] = self
        return self

    def _check_device(self) -> int:
        current = runtime.getDevice()
        if self.device_id not in (-1, current):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device "
                f"({current})"
            )
        return current

    @property
    def done(self) -> bool:
        return runtime.streamQuery(self.ptr) == 0

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)

    def add_callback(self, callback: Callable[[Any, int, Any], None], arg: Any) -> None:
        runtime.streamAddCallback(self.ptr, lambda _, status, __: callback(self, status, arg), 0)

    def launch_host_func(self, callback: Callable[[Any], None], arg: Any) -> None:
        runtime.launchHostFunc(self.ptr, lambda _: callback(arg), 0)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        runtime.eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def is_capturing(self) -> bool:
        return runtime.streamIsCapturing(self.ptr)

    @property
    def is_non_blocking(self) -> bool:
        return runtime.streamGetFlags(self.ptr) == runtime.streamNonBlocking


class Stream(_BaseStream):
    """A stream."""

    null: ClassVar["Stream"]

    def __init__(self, null: bool = False, non_blocking: bool = False, priority: int | None = None) -> None:
        if null:
            super().__init__(0, -1)
        else:
            ptr = runtime.streamCreateWithFlags(runtime.streamNonBlocking if non_blocking else runtime.streamDefault)
            super().__init__(ptr, runtime.getDevice())

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            runtime.streamDestroy(self.ptr)


Stream.null = Stream(null=True)


class ExternalStream(_BaseStream):
    """A stream that somebody else made."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__(ptr, device_id)


_locals = threading.local()


def _local() -> _ThreadLocal:
    try:
        local: _ThreadLocal = _locals.streams
    except AttributeError:
        local = _locals.streams = _ThreadLocal()
    return local


def get_current_stream(device_id: int = -1) -> _BaseStream:
    return _local().current[runtime.getDevice() if device_id == -1 else device_id]


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    return runtime.eventElapsedTime(start_event.ptr, end_event.ptr)
