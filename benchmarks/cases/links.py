"""Rounds over links as in the field, beside a raw socket that moves as many bytes over the same link."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases.sizes import MB, size_name
from benchmarks.cases.ways import BULK, GRPC
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT
from benchmarks.harness.links.spec import LinkSpec
from benchmarks.harness.verdicts import Target

_RAW_SOCKET = "raw socket"
_NUM_WORKERS = 2
_SIZES = {
    LinkSpec(10): 1 * MB,
    LinkSpec(200): 10 * MB,
    LinkSpec(1000): 50 * MB,
    LinkSpec(10, 0.08): 1 * MB,
    LinkSpec(200, 0.02): 10 * MB,
    LinkSpec(200, 0.08): 10 * MB,
}
_LONG_LINK, _LONG_LINK_BYTES = LinkSpec(1000, 0.08, by_packet=True), 100 * MB
_NUM_SOCKETS = 4
_FOUR_SOCKETS = f"{_NUM_SOCKETS} raw sockets"
_ONE_SOCKET_ONLY = {"GRADSERVE_BULK_SOCKETS": "1"}
_TARGETS = tuple(Target(_RAW_SOCKET, (_RAW_SOCKET,), 0.9, way.label) for way in (BULK, GRPC))


def comparisons() -> list[Comparison]:
    """All links; a gradient takes about as long on each of them."""
    return [*(_compare(link, num_bytes) for link, num_bytes in _SIZES.items()), _over_a_long_link()]


def _over_a_long_link() -> Comparison:
    """One worker, where the buffers of one TCP connection hold less than the link."""
    one_worker = replace(_compare(_LONG_LINK, _LONG_LINK_BYTES), num_bytes=2 * _LONG_LINK_BYTES)
    bulk, grpc, raw = (replace(each, num_workers=1) for each in one_worker.contestants)
    return replace(
        one_worker,
        title=f"round of one worker, {size_name(_LONG_LINK_BYTES)}, over {_LONG_LINK.name}",
        contestants=(
            bulk,
            replace(bulk, label=f"{bulk.label}, GRADSERVE_BULK_SOCKETS=1", variables=_ONE_SOCKET_ONLY),
            grpc,
            raw,
            replace(raw, label=_FOUR_SOCKETS, options={**raw.options, "num_sockets": _NUM_SOCKETS}),
        ),
        num_own=3,
        targets=(Target(_FOUR_SOCKETS, (_FOUR_SOCKETS,), 0.9, bulk.label),),
    )


def _compare(link: LinkSpec, num_bytes: int) -> Comparison:
    raw = Contestant(
        _RAW_SOCKET,
        PROJECT,
        server="benchmarks.peers.raw_socket.server",
        worker="benchmarks.peers.raw_socket.transfers",
        num_workers=_NUM_WORKERS,
        options={"num_bytes": num_bytes, "operation": "round"},
    )
    ways = (BULK, GRPC)
    contestants = (*(way.contestant("rounds", _NUM_WORKERS, num_bytes=num_bytes) for way in ways), raw)
    return Comparison(
        title=f"round of {_NUM_WORKERS} workers, {size_name(num_bytes)}, over {link.name}",
        contestants=tuple(replace(each, link=link) for each in contestants),
        # The payload of the whole round, because all of it goes through the one link.
        num_bytes=(_NUM_WORKERS + 1) * num_bytes,
        steps=1,
        targets=_TARGETS,
        num_own=len(ways),
        warm_up_steps=1,
    )
