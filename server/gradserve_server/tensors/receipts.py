"""The receipts of stored tensors: how clients delete tensors whose handles have not reached them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradserve_server.errors import InvalidArgumentError

MAX_RECEIPT_BYTES = 64
REMEMBERED_RECEIPTS = 10_000
"""The number of latest void receipts that a server remembers."""


class Receipt(NamedTuple):
    """A client's name for the tensors that one call stores.

    Attributes:
        owner: The name of the identity that makes the call.
        name: The name, which that identity chose at random.
    """

    owner: str
    name: bytes


class Receipts:
    """The stored tensors of each receipt, and the latest receipts that are void.

    A receipt becomes void when its client gives up the call. What the call stores after that is deleted at once.
    """

    def __init__(self, delete: Callable[[Sequence[str]], int]) -> None:
        self._delete = delete
        self._handles: dict[Receipt, dict[str, None]] = {}
        self._receipts: dict[str, Receipt] = {}
        self._void: OrderedDict[Receipt, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._receipts)

    def sign(self, receipt: Receipt, handle: str) -> None:
        """Notes that a tensor was stored; deletes it if nobody waits for its handle any more."""
        if receipt in self._void:
            self._delete([handle])
            return
        self._handles.setdefault(receipt, {})[handle] = None
        self._receipts[handle] = receipt

    def redeem(self, receipt: Receipt) -> int:
        """Deletes the tensors of a receipt, and makes it void; returns the number of tensors."""
        self._void[receipt] = None
        self._void.move_to_end(receipt)
        if len(self._void) > REMEMBERED_RECEIPTS:
            self._void.popitem(last=False)
        return self._delete(list(self._handles.get(receipt, ())))

    def forget(self, handle: str) -> None:
        """Notes that a tensor was deleted."""
        receipt = self._receipts.pop(handle, None)
        if receipt is not None:
            named = self._handles[receipt]
            del named[handle]
            if not named:
                del self._handles[receipt]


def check_receipt(name: bytes, field: str) -> bytes:
    """Returns a receipt of a request.

    Raises:
        InvalidArgumentError: It is too long.
    """
    if len(name) > MAX_RECEIPT_BYTES:
        raise InvalidArgumentError(
            f"expected a receipt of at most {MAX_RECEIPT_BYTES} bytes, got {len(name)}", field=field
        )
    return name
