"""How requests and replies refer to tensors.

A new way for tensors to travel, say through memory that client and server share, is another kind of reference here,
and what opens it in `opening`.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from gradserve_server.tensors.store import TensorSpec


@dataclass(frozen=True, slots=True)
class Malformed:
    """A description that no tensor can have. Opening it is what fails, so that checks keep their order.

    Attributes:
        message: What is wrong with it.
        field: Where, below the field of the tensor: ".shape"; empty for the tensor itself.
    """

    message: str
    field: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Inline:
    """A tensor that is in the message itself.

    Attributes:
        array: In host memory. Read-only where it came with a request.
    """

    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that is on the server.

    Attributes:
        handle: Where the store has it.
        spec: What the message says of it: a request may be wrong about it. None if it says nothing.
    """

    handle: str
    spec: TensorSpec | Malformed | None = None


Reference: TypeAlias = Inline | Stored | Malformed
