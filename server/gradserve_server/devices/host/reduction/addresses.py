"""Arrays by their addresses, for kernels that compute on many.

Importing this imports Numba, which takes half a second.
"""

from typing import Any

from numba import types
from numba.np.arrayobj import populate_array

from gradserve_server.devices.host.intrinsics import intrinsic


@intrinsic
def array_at(typing_context: Any, like: Any, address: Any, count: Any) -> Any:
    """Returns the `count` elements at an address as an array of the type of `like`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(like)(context, builder)
        element = context.get_data_type(like.dtype)
        num_bytes = context.get_constant(types.intp, context.get_abi_sizeof(element))
        data = builder.inttoptr(args[1], element.as_pointer())
        layout: dict[str, Any] = {"shape": [args[2]], "strides": [num_bytes], "itemsize": num_bytes, "meminfo": None}
        populate_array(array, data=data, **layout)  # type: ignore[no-untyped-call]
        return array._getvalue()

    return like(like, address, count), generate
