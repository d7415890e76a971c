"""The limits of the contract on lengths and counts, and texts of any length made fit for messages."""

from collections.abc import Collection, Sized
from itertools import islice

from gradserve_server.errors import InvalidArgumentError

MAX_NAME_BYTES = 1024
"""The longest name of a resource, container, component, variable or collection, in UTF-8."""
MAX_ID_BYTES = 128
"""The longest id that a client makes up, in UTF-8."""
MAX_WORKER_ID_BYTES = 256
"""The longest id of a worker, in UTF-8: it may begin with the name of a host."""
MAX_DIGEST_BYTES = 32
"""The longest digest of a worker's parameters."""
MAX_TOKEN_BYTES = 2048
"""The longest token of a page: names in base64 are shorter."""

MAX_DIMENSIONS = 254
"""The most dimensions of a shape, as in TensorFlow."""
MAX_ARRAY_DIMENSIONS = 64
"""The most dimensions of a tensor with elements: NumPy takes no more."""
MAX_COMPONENTS = 1 << 16
"""The most components of an accumulator."""
MAX_COMPONENT_DIMENSIONS = 1 << 18
"""The most dimensions of the components of an accumulator, all together."""
MAX_AGREEMENT = 64
"""The most entries of the agreement of an accumulator."""
MAX_METRICS = 32
"""The most metrics of an update or a report on a version."""
MAX_METRIC_NAME_BYTES = 64
"""The longest name of a metric, in UTF-8."""
MAX_STREAM_TENSORS = 2 * MAX_COMPONENTS
"""The most tensors of a stream: a sparse component has two."""
MAX_NETWORK_PARTS = 1 << 12
"""The most matrices of a recurrent network, and the most biases: an LSTM of 512 layers has as many."""
MAX_FORWARDS = 1 << 16
"""The most forwards of a layer that one request names."""
MAX_UNANSWERED = 1024
"""The most calls that a request names as unanswered."""

MAX_SUMMANDS = 1024
"""The most gradients that a sum consists of."""
MAX_LOADED_STEP = 1 << 62
"""The greatest step, and count of rounds, of saved parameters: later ones, counted on from there, fit into 64 bits."""

_SHOWN_CHARACTERS = 100
_SHOWN_ENTRIES = 10
_MOST_BYTES_OF_A_CHARACTER = 4


def check_length(text: str, limit: int, field: str) -> None:
    """Checks that a text has at most `limit` bytes in UTF-8.

    Raises:
        InvalidArgumentError: It is longer.
    """
    if _MOST_BYTES_OF_A_CHARACTER * len(text) > limit:
        num_bytes = len(text) if text.isascii() else len(text.encode())
        if num_bytes > limit:
            raise InvalidArgumentError(f"expected at most {limit} bytes, got {num_bytes}", field=field)


def check_count(things: Sized, limit: int, what: str, field: str) -> None:
    """Checks that a repeated field has at most `limit` elements.

    Raises:
        InvalidArgumentError: It has more.
    """
    if len(things) > limit:
        raise InvalidArgumentError(f"expected at most {limit} {what}, got {len(things)}", field=field)


def quoted(text: str) -> str:
    """Returns a text of any length in quotes for a message, which may have only its beginning."""
    return repr(text) if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}..."


def listed(names: Collection[str]) -> str:
    """Returns any number of names for a message, which may have only the first of them."""
    shown = ", ".join(map(quoted, islice(names, _SHOWN_ENTRIES)))
    more = f" and {len(names) - _SHOWN_ENTRIES} more" if len(names) > _SHOWN_ENTRIES else ""
    return f"[{shown}{more}]"
