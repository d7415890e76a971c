"""Receipts: names by which a client has the server delete what a call has stored, if its reply does not arrive.

A reply may be on its way when the call is cancelled or its connection ends, so that nobody learns of the handles in it.
"""

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakMethod

from gradserve.calls.exchange import Operation, Unary, Upload, Whole
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2

_AT_ONCE = 1000
_SECONDS = 5.0
"""The time limit of a call that redeems receipts."""


def new_receipt() -> bytes:
    """Returns a receipt that nobody can guess."""
    return os.urandom(16)


def take_receipt(exchange: Any) -> bytes:
    """Returns the receipt of an exchange that was sent, and gives it another one for its next attempt.

    Empty if what the exchange stores has no receipt.
    """
    match exchange:
        case Upload(header=header):
            return renew_receipt(header)
        case Whole(call):
            return take_receipt(call)
        case Unary(request=request):
            return renew_receipt(request.message if isinstance(request, WithContents) else request)
    return b""


def renew_receipt(message: Any) -> bytes:
    """Gives a request another receipt, if it has one; returns the one before."""
    fields = message.DESCRIPTOR.fields_by_name
    place = message.placement if "placement" in fields else message if "receipt" in fields else None
    if place is None or not place.receipt:
        return b""
    receipt: bytes = place.receipt
    place.receipt = new_receipt()
    return receipt


class LostReplies:
    """The receipts of a client's calls whose replies have not arrived; redeems them in the background.

    Many at a time: a client may give up thousands of calls at once. Safe to use from several threads.
    """

    def __init__(self, begin: Callable[[Callable[[], Operation[None]]], None]) -> None:
        self._begin = WeakMethod(begin)  # the client's; it must not be kept alive
        self._lock = threading.Lock()
        self._receipts: dict[int, list[bytes]] = {}

    def add(self, target: int, receipt: bytes) -> None:
        """Has a server delete what it has stored, or will store, with a receipt."""
        with self._lock:
            is_first = target not in self._receipts
            self._receipts.setdefault(target, []).append(receipt)
        begin = self._begin()
        if is_first and begin is not None:
            begin(partial(self._redeem, target))

    def _redeem(self, target: int) -> Operation[None]:
        while receipts := self._next(target):
            request = messages_pb2.DeleteTensorsRequest(receipts=receipts)
            call = Unary("TensorService", "DeleteTensors", request, at_most=_SECONDS, target=target)
            try:
                yield Whole(call, repeatable=False)
            except GradserveError:
                continue  # the server is not there: it has deleted what it could not send, or ends it with its lease

    def _next(self, target: int) -> list[bytes]:
        with self._lock:
            waiting = self._receipts[target]
            receipts, self._receipts[target] = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            if not receipts:
                del self._receipts[target]
            return receipts
