"""References to tensors in requests and replies.

A new way for tensors to travel needs another kind of reference here, and code in `opening` that opens it.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.resources.quotas import Account
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.spec import TensorSpec


class PayloadMemory(Protocol):
    """The memory beside a message, in which tensors are.

    Attributes:
        memory: The account of what the call owns of it, None if it owns nothing.
    """

    memory: Account | None

    @property
    def is_filled(self) -> bool:
        """True if tensors fill what the call owns of it, but for gaps between them."""
        ...

    def adopt(self, num_bytes: int, /) -> None:
        """Counts memory into which a tensor in the client's memory is copied: the call owns it then.

        Raises:
            ResourceExhaustedError: There is no room for it.
        """
        ...

    async def arrived(self, part: NDArray[Any] | None = None, /) -> None:
        """Waits until an array in the memory has arrived; until all has, for None."""
        ...

    def check_lender(self) -> None:
        """Checks that whoever lends parts of it is still there; it may hold anything otherwise.

        Raises:
            AbortedError: The caller has left.
        """
        ...

    def begin_use(self, num_tensors: int, /) -> None:
        """Notes that a call opens some of its tensors."""
        ...

    def end_use(self) -> None:
        """Notes that the call has closed them."""
        ...


@dataclass(frozen=True, slots=True)
class Malformed:
    """A description that no tensor can have. The error is raised on opening, so that checks keep their order.

    Attributes:
        message: What is wrong with it.
        field: The path below the field of the tensor: ".shape"; empty for the tensor itself.
    """

    message: str
    field: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Inline:
    """A tensor in the message itself.

    Attributes:
        array: The array, in host memory. Read-only if it came with a request.
    """

    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor stored on the server.

    Attributes:
        handle: Its handle.
        spec: Its description in the message, which may be wrong in a request. None if there is none.
        user: Who refers to it.
    """

    handle: str
    spec: TensorSpec | Malformed | None = None
    user: Identity = ANONYMOUS


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """A tensor beside the message, in memory that the call owns and may keep.

    Attributes:
        array: The array, in host memory; in the memory of the ops' device if it was copied there from the client's.
        payload: The memory that it is part of.
    """

    array: Array
    payload: PayloadMemory


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """A tensor in a client's memory, which the client can change at any time.

    Attributes:
        array: The array, read-only, in host memory.
        payload: The memory that it is part of.
    """

    array: NDArray[Any]
    payload: PayloadMemory


@dataclass(frozen=True, slots=True, eq=False)
class LiveOnGpu:
    """A tensor in memory of the ops' GPU that is a client's, who can change it at any time.

    Attributes:
        array: The array, on that device.
        payload: The memory that it is part of.
    """

    array: Array
    payload: PayloadMemory


Reference: TypeAlias = Inline | Stored | Attached | Live | LiveOnGpu | Malformed
