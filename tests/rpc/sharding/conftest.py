"""Two servers for each module."""

from collections.abc import Iterator

import pytest

from tests.rpc.sharding.raw_shards import RawShards, running


@pytest.fixture(scope="module")
def servers() -> Iterator[RawShards]:
    with running() as shards:
        yield shards


@pytest.fixture
def shards(servers: RawShards) -> Iterator[RawShards]:
    """A new accumulator on both servers."""
    servers.create()
    yield servers
    servers.delete()
