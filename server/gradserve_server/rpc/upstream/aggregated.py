"""One accumulator upstream, as an aggregator knows it."""

from collections import OrderedDict
from collections.abc import Callable

from gradserve.v1 import accumulator_pb2
from gradserve_server.accumulators.identity import CallsUnderWay, RequestId
from gradserve_server.accumulators.spec import AccumulatorSpec, Layout
from gradserve_server.rpc.accumulators.requests import GradientRequest
from gradserve_server.rpc.upstream.answers import Answer
from gradserve_server.rpc.upstream.shards import UpstreamShards
from gradserve_server.upstream.batches import Batches
from gradserve_server.upstream.latest import LatestAverage
from gradserve_server.upstream.leaf import Leaf

_MOST_ANSWERED = 4096
"""Answered calls that are remembered: one that comes again need not wait for others, which would be refused with it."""

GradientLeaf = Leaf[GradientRequest, Answer]


class Aggregated:
    """What is the same for all calls on an accumulator, and the gradients on their way.

    Attributes:
        name: Its name, for messages.
        incarnation: Tells it from a later accumulator of the same name.
        spec: Its spec.
        adds_up: Whether its gradients may go together. Each row of a sparse mean is divided by the weights of only
            those gradients that have it, which a sum does not say.
        batches: The gradients that wait for others.
        under_way: The calls that have not been answered.
        latest: Its newest average.
        shards: What each server upstream has of it; None if it is on one of them as a whole.
    """

    def __init__(
        self,
        info: accumulator_pb2.AccumulatorInfo,
        spec: AccumulatorSpec,
        new_batches: "Callable[[Aggregated], Batches[GradientLeaf]]",
        latest: LatestAverage,
        shards: UpstreamShards | None,
    ) -> None:
        """Takes what the server upstream says of it, what collects gradients, and what is on which server.

        `latest` has no average yet.
        """
        self.name = f"{info.accumulator.container}/{info.accumulator.name}"
        self.incarnation = info.accumulator.incarnation
        self.spec = spec
        self.shards = shards
        self.adds_up = all(each.layout is Layout.DENSE for each in spec.components)
        self.under_way: CallsUnderWay[GradientLeaf] = CallsUnderWay()
        self.latest = latest
        self.batches = new_batches(self)
        self._answered: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._has_ended = False

    def may_add(self, leaf: GradientLeaf) -> bool:
        """Returns True if a gradient may go together with others, and has not been answered before."""
        is_ordered = bool(leaf.contribution.worker_id) or not self.spec.deterministic
        is_again = bool(getattr(leaf.request, "accepted_before", False)) or _id_of(leaf) in self._answered
        return self.adds_up and is_ordered and not is_again and not self._has_ended

    def end(self) -> list[GradientLeaf]:
        """Notes that it is gone; returns the gradients that wait for others, of which there will be no more."""
        self._has_ended = True
        self.latest.end()
        return self.batches.close()

    def begin(self, call: RequestId | None, leaf: GradientLeaf) -> None:
        """Notes that a call is under way, until it is answered."""
        self.under_way.begin(call, leaf)
        leaf.answer.add_done_callback(lambda _: self._end(call, leaf))

    def _end(self, call: RequestId | None, leaf: GradientLeaf) -> None:
        self.under_way.end(call, leaf)
        if call is not None:
            self._answered[_id_of(leaf)] = None
            if len(self._answered) > _MOST_ANSWERED:
                self._answered.popitem(last=False)


def _id_of(leaf: GradientLeaf) -> tuple[str, int]:
    return leaf.request.request_id.client_id, leaf.request.request_id.sequence
