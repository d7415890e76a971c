"""Values for variables, from the tensors that a request refers to."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.layers.initializers import TensorInitializer
from gradserve_server.tensors.opening import TensorOpener
from gradserve_server.tensors.references import Reference


@dataclass(frozen=True)
class GivenVariable:
    """A value for a variable."""

    name: str
    tensor: Reference


@contextmanager
def open_variables(opener: TensorOpener, variables: Sequence[GivenVariable]) -> Iterator[dict[str, Array]]:
    """Yields values by name for a call to set variables to; the variables keep referring to their memory.

    Raises:
        InvalidArgumentError: There are no values, or one is malformed or given twice.
        NotFoundError: A handle does not exist.
    """
    if not variables:
        raise InvalidArgumentError("expected at least one variable, got none", field="variables")
    paths: dict[str, str] = {}
    for index, variable in enumerate(variables):
        if variable.name in paths:
            raise InvalidArgumentError(
                f"expected each variable once, got {variable.name!r} twice", field=f"variables[{index}].name"
            )
        paths[variable.name] = f"variables[{index}].tensor"
    with opener.open({paths[each.name]: each.tensor for each in variables}) as tensors:
        values = {name: tensors[path] for name, path in paths.items()}
        tensors.share()
        yield values


async def open_initializer(opener: TensorOpener, tensor: Reference, path: str) -> TensorInitializer:
    """Returns the initializer of a tensor, whose memory a layer may refer to from now on.

    Args:
        opener: What opens the tensor.
        tensor: The initial value.
        path: The path of the tensor in the request.

    Raises:
        InvalidArgumentError: The tensor is malformed.
        NotFoundError: The handle does not exist.
        MemoryError: There is no host memory for the value.
    """
    with opener.open({path: tensor}) as tensors:
        arrays = await tensors.copy_to_host()
        tensors.share()
        return TensorInitializer(arrays[path])
