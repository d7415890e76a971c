"""An aggregator: its link upstream, and the services that forward to it."""

import time

from gradserve.calls.identity import RequestIds
from gradserve_server.accumulators.incoming import GradientReceiver
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.config.servers import UpstreamConfig
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.lifetimes import ClientLeases
from gradserve_server.rpc.accumulators.service import AccumulatorServicer
from gradserve_server.rpc.parameters.service import ParameterServicer
from gradserve_server.rpc.tensors.messages import TensorDeliverer
from gradserve_server.rpc.upstream.forwarding import Arrivals, Forwarding
from gradserve_server.rpc.upstream.leases import AggregatingLeases
from gradserve_server.rpc.upstream.link import UpstreamLink
from gradserve_server.rpc.upstream.parameters import AggregatingParameters
from gradserve_server.rpc.upstream.service import AggregatingServicer
from gradserve_server.tensors.incoming import TensorOpener
from gradserve_server.upstream.batches import Counts, ForwardingRule
from gradserve_server.upstream.latest import LatestAverages


class Aggregator:
    """Serves what is upstream to the workers of a host. Opened and used on one event loop.

    Attributes:
        address: The address upstream.
        accumulators: AccumulatorService.
        parameters: ParameterService.
        leases: LeaseService.
    """

    def __init__(
        self,
        config: UpstreamConfig,
        *,
        place: Place,
        memory: Budget,
        incarnation: str,
        counts: Counts,
        receiver: GradientReceiver,
        opener: TensorOpener,
        deliverer: TensorDeliverer,
        accumulators: tuple[AccumulatorServicer, AccumulatorRegistry],
        parameters: tuple[ParameterServicer, ParametersRegistry],
        clients: ClientLeases,
    ) -> None:
        """Takes its parts; `open` follows.

        Args:
            config: The address upstream, and when gradients go there.
            place: The memory in which sums are computed.
            memory: Their budget, which is also that of averages and versions for as long as they are kept.
            incarnation: The id of this run of the server.
            counts: Counts what is forwarded.
            receiver: Receives gradients and updates.
            opener: Opens the tensors of saved versions.
            deliverer: Delivers averages and versions.
            accumulators: What serves the accumulators of one client alone, and their registry.
            parameters: What serves the parameters of one client alone, and their registry.
            clients: The leases of clients here.
        """
        assert config.upstream is not None, "there is an aggregator only with a server upstream"
        self.address = config.upstream
        self._link = UpstreamLink(config.upstream)
        rule = ForwardingRule(config.upstream_workers or 1, config.upstream_grace_seconds)
        forwarding = Forwarding(self._link, place, memory, RequestIds(incarnation, time.monotonic), rule, counts)
        arrivals, latest = Arrivals(forwarding, receiver), LatestAverages(memory)
        self.accumulators = AggregatingServicer(forwarding, arrivals, latest, *accumulators, deliverer)
        self.parameters = AggregatingParameters(forwarding, arrivals, latest, *parameters, opener, deliverer)
        self.leases = AggregatingLeases(clients, self._link)

    async def open(self) -> None:
        """Looks the servers upstream up; see `UpstreamLink.open`."""
        await self._link.open()

    async def close(self) -> None:
        """Ends the calls whose gradients and updates wait for others, of which nothing has counted; disconnects."""
        self.accumulators.close()
        self.parameters.close()
        await self._link.close()
