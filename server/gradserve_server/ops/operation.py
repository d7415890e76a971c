"""Ops, without their transport and their devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from gradserve_server.tensors.spec import TensorSpec

InputsT = TypeVar("InputsT")
AttributesT = TypeVar("AttributesT")
OutputsT = TypeVar("OutputsT")


class Plan(Protocol):
    """A checked call."""

    @property
    def output_specs(self) -> Sequence[TensorSpec]:
        """The specs of all outputs, in their order."""
        ...


PlanT = TypeVar("PlanT", bound=Plan)


def no_scratch(_inputs: object, _attributes: object, _plan: object) -> int:
    """Returns 0: the op takes no memory to speak of besides inputs and outputs."""
    return 0


class Family(Protocol):
    """The computation of some ops on one device. Safe to use from several threads."""

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`.

        Calls before it has ended give right results, but may be slower.
        """
        ...


@dataclass(frozen=True)
class Op(Generic[InputsT, AttributesT, OutputsT, PlanT]):
    """An op.

    Attributes:
        name: The name of its RPC.
        family: The name of the family that computes it; see `registry.make_families`.
        inputs: A dataclass of arrays, with the names of the request's fields; optional ones have the default None.
        attributes: A dataclass of the other fields of the request, each with its default.
        outputs: A dataclass of arrays, with the names of the response's fields.
        plan: Checks a call, of which it reads only dtypes and shapes. Raises InvalidArgumentError.
        compute: Computes a checked call on the device of the family, in whose memory the inputs are.
        scratch_bytes: Returns the most memory that a checked call takes besides inputs and outputs. A few MiB for each
            thread are not included.
        is_quick: Whether a call on little data takes less time than waking up a thread. False if a call consists of
            many steps, or of many small tensors.
    """

    name: str
    family: str
    inputs: type[InputsT]
    attributes: type[AttributesT]
    outputs: type[OutputsT]
    plan: Callable[[InputsT, AttributesT], PlanT]
    compute: Callable[[Any, InputsT, AttributesT, PlanT], OutputsT]
    scratch_bytes: Callable[[InputsT, AttributesT, PlanT], int] = no_scratch
    is_quick: bool = True


AnyOp: TypeAlias = Op[Any, Any, Any, Any]
