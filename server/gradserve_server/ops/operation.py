"""An op, apart from how it travels and where it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from gradserve_server.tensors.store import TensorSpec

InputsT = TypeVar("InputsT")
AttributesT = TypeVar("AttributesT")
OutputsT = TypeVar("OutputsT")


class Plan(Protocol):
    """A call that was checked."""

    @property
    def output_specs(self) -> Sequence[TensorSpec]:
        """The specs of all outputs, in their order."""
        ...


PlanT = TypeVar("PlanT", bound=Plan)


class Family(Protocol):
    """The computations of some ops on one device. Safe to use from several threads."""

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`.

        Calls before its end give right results, but may be slower.
        """
        ...


@dataclass(frozen=True)
class Op(Generic[InputsT, AttributesT, OutputsT, PlanT]):
    """An op.

    Attributes:
        name: That of its RPC.
        family: The name of the family that computes it; see `registry.make_families`.
        inputs: Dataclass of arrays, with the names of the fields of the request; those that may be missing have the
            default None.
        attributes: Dataclass of the other fields of the request, each with its default.
        outputs: Dataclass of arrays, with the names of the fields of the response.
        plan: Checks a call. Looks at dtypes and shapes only. Raises InvalidArgumentError.
        compute: Computes a call that was checked, on the device of the family, in whose memory the inputs are.
        is_quick: Whether a call on little data takes little time, less than a thread takes to wake up. Not so where
            many steps, or many small tensors, make up one call.
    """

    name: str
    family: str
    inputs: type[InputsT]
    attributes: type[AttributesT]
    outputs: type[OutputsT]
    plan: Callable[[InputsT, AttributesT], PlanT]
    compute: Callable[[Any, InputsT, AttributesT, PlanT], OutputsT]
    is_quick: bool = True


AnyOp: TypeAlias = Op[Any, Any, Any, Any]
