"""Deletes accumulators upstream."""

import asyncio

from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2
from gradserve_server.errors import NotFoundError
from gradserve_server.rpc.upstream.upstream import Upstream


async def delete(
    link: Upstream, request: messages_pb2.DeleteAccumulatorRequest
) -> messages_pb2.DeleteAccumulatorResponse:
    """Deletes an accumulator at its home, and then what other servers have of it, but nothing of a later one.

    In this order: a home that stays would name gradients that others have no more.

    Args:
        link: The servers upstream.
        request: The request of the client here, who need not know of other servers.

    Raises:
        ServiceError: See `Upstream.call`; other servers have been asked all the same.
    """
    ref = request.accumulator
    named = accumulator_pb2.AccumulatorRef(container=ref.container, name=ref.name)
    is_everywhere = link.cluster.size > 1 and await _may_have_parts(link, named, ref.incarnation)
    response = await _deleted(link, ref, request.home_incarnation)
    if is_everywhere:
        home = link.cluster.home_of(ref.container, ref.name)
        gone = response.home_incarnation
        others = [_deleted(link, named, gone, target) for target in range(link.cluster.size) if target != home]
        for each in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(each, BaseException):
                raise each
            response.deleted |= each.deleted
    response.ClearField("home_incarnation")
    return response


async def _deleted(
    link: Upstream, ref: accumulator_pb2.AccumulatorRef, home_incarnation: str, target: int | None = None
) -> messages_pb2.DeleteAccumulatorResponse:
    request = messages_pb2.DeleteAccumulatorRequest(home_incarnation=home_incarnation)
    request.accumulator.CopyFrom(ref)
    response: messages_pb2.DeleteAccumulatorResponse = await link.call("DeleteAccumulator", request, target=target)
    return response


async def _may_have_parts(link: Upstream, named: accumulator_pb2.AccumulatorRef, incarnation: str) -> bool:
    """Returns whether other servers than the home may have something of an accumulator that is to be deleted."""
    request = messages_pb2.GetAccumulatorRequest()
    request.accumulator.CopyFrom(named)
    try:
        info = (await link.call("GetAccumulator", request)).info
    except NotFoundError:
        return True  # of one that its home has lost
    return bool(info.spec.num_shards) and incarnation in ("", info.accumulator.incarnation)
