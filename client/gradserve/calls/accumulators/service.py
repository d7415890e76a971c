"""Names of the services of accumulators and of parameters for what both have: rounds, contributions, requests.

Sessions and wires are written once, for a `RoundService`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import Message

from gradserve.calls.exchange import Operation, Unary
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, parameters_pb2

Ref: TypeAlias = accumulator_pb2.AccumulatorRef | parameters_pb2.ParametersRef
"""The name of an accumulator or of parameters; both have the same fields."""
Info: TypeAlias = accumulator_pb2.AccumulatorInfo | parameters_pb2.ParametersInfo


class Method(NamedTuple):
    """A method of a service.

    Attributes:
        name: Its name.
        request: The type of its requests.
    """

    name: str
    request: type[Any]


class Accepted(NamedTuple):
    """The round of a contribution, as the answer tells it.

    Attributes:
        round: The number of the round that it is in; 0 if it is in none.
        num_rounds: The number of rounds that have ended.
        step: The step after the call.
    """

    round: int
    num_rounds: int
    step: int


@dataclass(frozen=True)
class RoundService:
    """A service of resources with rounds to which workers contribute.

    Attributes:
        name: Its name, without its package.
        subject: The field of requests and descriptions with the name of the resource, and how messages call it.
        contribution: The field of requests with what a worker adds to a round, and how messages call it.
        get: Describes a resource.
        ask: Says how many rounds have ended.
        apply: Adds a contribution.
        push_pull: Adds a contribution, and waits for the end of its round.
        num_ended: Returns how many rounds have ended, from the answer to `ask`.
        accepted: Returns what the answer to `apply` says.
        step: Returns the step of a description.
    """

    name: str
    subject: str
    contribution: str
    get: Method
    ask: Method
    apply: Method
    push_pull: Method
    num_ended: Callable[[Any], int]
    accepted: Callable[[Any], Accepted]
    step: Callable[[Any], int]

    def ref(self, message: Any) -> Any:
        """Returns the name of the resource in a request or a description, to be read or written."""
        return getattr(message, self.subject)

    def request(self, method: Method, ref: Ref) -> Any:
        """Returns a request of a method that has nothing but the name of the resource."""
        request = method.request()
        self.ref(request).CopyFrom(ref)
        return request

    def described(self, ref: Ref) -> Operation[Any]:
        """Returns the description of a resource."""
        reply = yield Unary(self.name, self.get.name, self.request(self.get, ref))
        return reply.info

    def named(self, info: Any) -> Any:
        """Returns the name in a description, for the run of the server that has sent it."""
        ref = type(self.ref(info))()
        ref.CopyFrom(self.ref(info))
        ref.server_incarnation = info.server_incarnation
        return ref

    def counted(self, number: int) -> str:
        """Returns so many contributions in words: "1 gradient", "2 updates"."""
        return f"{number} {self.contribution}{'' if number == 1 else 's'}"


ACCUMULATORS = RoundService(
    name="AccumulatorService",
    subject="accumulator",
    contribution="gradient",
    get=Method("GetAccumulator", messages_pb2.GetAccumulatorRequest),
    ask=Method("GetNumAccumulated", messages_pb2.GetNumAccumulatedRequest),
    apply=Method("ApplyGradient", messages_pb2.ApplyGradientRequest),
    push_pull=Method("PushPull", messages_pb2.PushPullRequest),
    num_ended=lambda reply: reply.num_rounds,
    accepted=lambda answer: Accepted(answer.round, answer.num_rounds, answer.global_step),
    step=lambda info: info.global_step,
)


def without_run(ref: Any) -> Any:
    """Returns a name that is for any run of the server."""
    copied: Message = type(ref)()
    copied.CopyFrom(ref)
    copied.ClearField("server_incarnation")
    return copied
