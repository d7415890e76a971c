"""Where arrays are."""

from typing import Any


def place_of(array: Any) -> Any:
    """Returns the devices of an array, for `jax.device_put`; None if it is not committed to them.

    JAX moves arrays that are not committed to where others are that they are used with.
    """
    return array.sharding if array.committed else None
