"""References to tensors in requests and replies.

A new way for tensors to travel, such as memory shared by client and server, needs another kind of reference here, and
code in `opening` that opens it.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from gradserve_server.tensors.spec import TensorSpec


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
    """

    handle: str
    spec: TensorSpec | Malformed | None = None


Reference: TypeAlias = Inline | Stored | Malformed
