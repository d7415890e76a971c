"""Pages of the accumulators of an aggregator: those of all servers upstream, and its own private ones, by name."""

from collections import Counter
from collections.abc import Sequence

from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.wire.placement import home_of
from gradserve_server.rpc.boundary.fields import Page


def merged(
    page: Page,
    container: str,
    here: messages_pb2.ListAccumulatorsResponse,
    upstream: Sequence[messages_pb2.ListAccumulatorsResponse],
) -> messages_pb2.ListAccumulatorsResponse:
    """Returns one page out of the pages that several lists have for the same `page_token` and `page_size`.

    Each is sorted by name, and so is the result. Names after the end of a page that is not its list's last may be
    preceded by others of that list, so they are left to the next page. A sharded accumulator is in the lists of all of
    its servers, and in the result as its home describes it, with the memory of all.

    Args:
        page: The page.
        container: The container, as in the request.
        here: The page of this server's own accumulators.
        upstream: Those of the servers upstream, in their order.
    """
    responses = [here, *upstream]
    ends = [each.accumulators[-1].accumulator.name for each in responses if each.next_page_token and each.accumulators]
    end = min(ends, default=None)
    sizes = Counter[str]()
    for each in responses:
        for info in each.accumulators:
            sizes[info.accumulator.name] += info.num_bytes
    found = list(here.accumulators)
    for target, each in enumerate(upstream):
        for info in each.accumulators:
            if not info.spec.num_shards or home_of(container, info.accumulator.name, len(upstream)) == target:
                info.num_bytes = sizes[info.accumulator.name]
                found.append(info)
    found.sort(key=lambda info: info.accumulator.name)
    within = [info for info in found if end is None or info.accumulator.name <= end]
    shown = within[: page.size]
    is_last = end is None and len(shown) == len(found)
    last = shown[-1].accumulator.name if shown else ""
    return messages_pb2.ListAccumulatorsResponse(
        accumulators=shown, next_page_token=page.next_token(last, is_last=is_last)
    )
