"""What the client takes as an array, and as a dtype."""

from typing import Any, Protocol, TypeAlias

import numpy.typing as npt


class SupportsDLPack(Protocol):
    """A tensor of whatever library that exports its memory: https://dmlc.github.io/dlpack."""

    def __dlpack__(self) -> Any:
        """Returns the capsule."""
        ...

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Returns where the tensor lies."""
        ...


ArrayLike: TypeAlias = npt.ArrayLike | SupportsDLPack
"""An array or tensor of whatever library, or numbers in lists of any depth."""

DTypeLike: TypeAlias = npt.DTypeLike | Any
"""A dtype of NumPy, its name, or a dtype of another library: torch.float32, tf.float32, jnp.float32."""
