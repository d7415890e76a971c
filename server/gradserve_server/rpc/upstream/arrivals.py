"""Gradients and updates as they arrive at an aggregator: opened, checked, and held until nobody needs them any more."""

from gradserve_server.accumulators.gradient import Contribution, Gradient, OpenGradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import GradientReceiver, IncomingGradient, check_contribution
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.accumulators.sums.checking import Check
from gradserve_server.devices.compute import PIECE_BYTES
from gradserve_server.errors import ResourceExhaustedError, ServiceError
from gradserve_server.rpc.upstream.aggregated import Aggregated, GradientLeaf
from gradserve_server.rpc.upstream.forwarding import Forwarding
from gradserve_server.rpc.upstream.messages import Answer, Contributed, batch_key, without_tensors
from gradserve_server.security.identity import Identity
from gradserve_server.upstream.leaf import Leaf


class Arrivals:
    """Takes gradients from the calls of workers to the batches, and the answers back. Used on the event loop only."""

    def __init__(self, forwarding: Forwarding, receiver: GradientReceiver) -> None:
        self._forwarding = forwarding
        self._place = forwarding.place
        self._compute = forwarding.place.compute
        self._receiver = receiver

    async def answered(
        self,
        resource: Aggregated,
        spec: AccumulatorSpec,
        request: Contributed,
        decoded: tuple[RequestId | None, Contribution, IncomingGradient],
        user: Identity,
        timeout: float | None,
    ) -> tuple[Answer, bool]:
        """Passes a gradient on; returns the answer, and whether an earlier call with the same id gets the same one.

        Args:
            resource: Where it belongs.
            spec: The spec of a gradient with its components.
            request: The request that brings it.
            decoded: The id of its call, its step, weight and sender, and the gradient.
            user: The caller.
            timeout: Seconds to wait for the answer; None for no limit.

        Raises:
            TimeoutError: There was no answer in time.
            ServiceError: The gradient is not valid here, or the error of the server upstream.
        """
        request_id, contribution, given = decoded
        check_contribution(resource.name, resource.spec, contribution)
        self._forwarding.counts.gradients += contribution.num_gradients
        opening = await self._receiver.receive(spec, self._place, given)
        leaf = resource.under_way.find(request_id)
        is_repeated = leaf is not None
        if leaf is None:
            leaf = Leaf(without_tensors(request, user), contribution)
            resource.begin(request_id, leaf)
        leaf.bring()
        self._forwarding.tasks.begin(self._bring(resource, spec, leaf, opening, is_repeated=is_repeated))
        return await leaf.wait(timeout), is_repeated

    async def _bring(
        self,
        resource: Aggregated,
        spec: AccumulatorSpec,
        leaf: GradientLeaf,
        opening: OpenGradient,
        *,
        is_repeated: bool,
    ) -> None:
        """Holds a gradient open while it is needed, and forwards it unless an earlier call has done so."""

        async def lend(gradient: Gradient) -> None:
            check = Check.of(spec, gradient, self._place)
            work = max(check.work, PIECE_BYTES * len(spec.components))
            checked = await self._compute.run(work, check.checked, None)
            returned = leaf.lend(checked)
            if not is_repeated:
                self._pass_on(resource, leaf)
            await returned

        try:
            await opening(lend)
        except Exception as error:
            if is_repeated:
                if not isinstance(error, ServiceError | MemoryError):
                    raise
            elif isinstance(error, MemoryError):
                leaf.fail(ResourceExhaustedError("the aggregator has no memory left for this gradient"))
            else:
                leaf.fail(error)
                if not isinstance(error, ServiceError):
                    raise
        finally:
            leaf.brought()

    def _pass_on(self, resource: Aggregated, leaf: GradientLeaf) -> None:
        if resource.may_add(leaf):
            resource.batches.add(batch_key(leaf.request), leaf, leaf.contribution.num_gradients)
        else:
            self._forwarding.forward(resource, [leaf])
