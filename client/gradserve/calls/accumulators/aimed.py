"""The operations on an accumulator of another server than the first of the client's list."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from gradserve.calls.accumulators.wire import AccumulatorWire
from gradserve.calls.exchange import Operation
from gradserve.calls.together import at_target
from gradserve.errors import InvalidArgumentError


class AimedWire(AccumulatorWire):
    """The operations on one accumulator, sent to its home. Those of a single server take no such detour."""

    def _gradient_fields(self, *args: Any, has_handles: bool) -> dict[str, Any]:
        if has_handles:
            raise InvalidArgumentError(
                f"expected arrays, got the handle of a tensor: tensors are on server 0 of the cluster, and accumulator "
                f"{self.ref.name!r} is on server {self.target}",
                field="gradient",
            )
        return super()._gradient_fields(*args, has_handles=has_handles)


def _aimed(operation: Callable[..., Operation[Any]]) -> Callable[..., Operation[Any]]:
    @wraps(operation)
    def at_home(self: AimedWire, *args: Any, **kwargs: Any) -> Operation[Any]:
        return at_target(self.target, operation(self, *args, **kwargs))

    return at_home


for _name in ("apply", "take", "push_pull", "read_average", "num_accumulated", "set_global_step", "info", "delete"):
    setattr(AimedWire, _name, _aimed(getattr(AccumulatorWire, _name)))
