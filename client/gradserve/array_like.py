"""The types of array and dtype arguments."""

from typing import Any, Protocol, TypeAlias

import numpy.typing as npt


class SupportsDLPack(Protocol):
    """A tensor of any library that exports its memory as https://dmlc.github.io/dlpack says."""

    def __dlpack__(self) -> Any:
        """Returns the DLPack capsule."""
        ...

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Returns the device of the tensor."""
        ...


ArrayLike: TypeAlias = npt.ArrayLike | SupportsDLPack
"""An array or tensor of any library, or numbers in lists of any depth."""

DTypeLike: TypeAlias = npt.DTypeLike | Any
"""A dtype of NumPy, its name, or a dtype of another library: torch.float32, tf.float32, jnp.float32."""
