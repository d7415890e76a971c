"""Lists of much: a page costs what is on it."""

import itertools
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as layer_messages_pb2
from gradserve_server.config import LeaseConfig
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.memory import Memory
from gradserve_server.tensors.held import Serials
from gradserve_server.tensors.store import TensorStore
from gradserve_testing import LocalServer
from tests.bad_input.layer_tables import config, create_request
from tests.bad_input.requests import Create, component, ref, spec
from tests.floods.work import calls_of
from tests.servers.raw_calls import RawCalls
from tests.tensors.keeping import keep_now


def store_of(num_tensors: int, handles: Budget | None = None) -> TensorStore:
    store = TensorStore(
        pool=BufferPool(0),
        memory=Memory(Budget(1 << 40, "bytes")),
        handles=handles or Budget(1 << 40, "handles"),
        leases=LeaseConfig(),
        clock=lambda: 0.0,
        new_handle=map(str, itertools.count()).__next__,
    )
    keep_now(store, [np.empty(0)] * num_tensors, None, shared=False)
    return store


class TestTensors:
    def test_a_page_costs_the_same_among_many(self) -> None:
        few, many = store_of(2000), store_of(50_000)
        assert calls_of(lambda: many.page(1000, 500)) == calls_of(lambda: few.page(1000, 500))

    def test_a_page_after_many_that_were_deleted(self) -> None:
        store = store_of(50_000)
        store.delete([str(number) for number in range(10, 49_990)])
        assert [each.serial for each in store.page(0, 20)] == [*range(1, 11), *range(49_991, 50_001)]
        few = store_of(20)
        assert calls_of(lambda: store.page(0, 20)) < 2 * calls_of(lambda: few.page(0, 20))

    async def test_what_came_back_is_in_its_place(self) -> None:
        store = store_of(2000)
        with suppress(ZeroDivisionError):
            async with store.use(["700", "3", "1999"], release=True):
                assert [each.handle for each in store.page(1, 4)] == ["1", "2", "4", "5"]
                raise ZeroDivisionError
        assert [each.handle for each in store.page(0, 2000)] == [str(number) for number in range(2000)]


def test_serials() -> None:
    serials: Serials[int] = Serials()
    model: set[int] = set()
    random = np.random.default_rng(1)
    for _ in range(5000):
        number = int(random.integers(0, 3000))
        if number in model:
            serials.remove(number)
            model.remove(number)
        else:
            serials.add(number, -number)
            model.add(number)
    for after, count in ((-1, 5000), (0, 3), (1499, 100), (2998, 10), (3001, 5)):
        assert serials.after(after, count) == [-each for each in sorted(model) if each > after][:count]


@pytest.fixture
def raw(server: LocalServer) -> Any:
    with RawCalls(server.address) as calls:
        yield calls


def pages(raw: RawCalls, method: str, request: Any, entries: str) -> list[list[Any]]:
    """Returns the entries of all pages."""
    found = []
    while True:
        page = raw.call(method, request)
        found.append(list(getattr(page, entries)))
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


class TestAccumulators:
    def test_those_of_many_components_come_on_several_pages(self, raw: RawCalls, name: str) -> None:
        large = spec(*[component(str(index)) for index in range(3000)])
        small = spec(component())
        for index in range(6):
            fields: Any = {"accumulator": ref(f"a{index}", container=name), "spec": large if index % 3 else small}
            raw.call("CreateAccumulator", Create(**fields))
        found = pages(raw, "ListAccumulators", messages_pb2.ListAccumulatorsRequest(container=name), "accumulators")
        assert [[each.accumulator.name for each in page] for page in found] == [
            ["a0", "a1"],
            ["a2", "a3"],
            ["a4"],
            ["a5"],
        ]
        assert [len(each.spec.components) for page in found for each in page] == [1, 3000, 3000, 1, 3000, 3000]
        for index in range(6):
            raw.call(
                "DeleteAccumulator",
                messages_pb2.DeleteAccumulatorRequest(accumulator=ref(f"a{index}", container=name)),
            )

    def test_those_of_large_agreements_come_on_several_pages(self, raw: RawCalls, name: str) -> None:
        agreed = spec(component(), agreement={str(index): "x" * 1024 for index in range(64)})
        for index in range(40):
            raw.call("CreateAccumulator", Create(accumulator=ref(f"{index:02}", container=name), spec=agreed))
        listing = messages_pb2.ListAccumulatorsRequest(container=name)
        found = pages(raw, "ListAccumulators", listing, "accumulators")
        assert [len(page) for page in found] == [31, 9]
        assert {len(each.spec.agreement) for page in found for each in page} == {64}
        for index in range(40):
            deletion = messages_pb2.DeleteAccumulatorRequest(accumulator=ref(f"{index:02}", container=name))
            raw.call("DeleteAccumulator", deletion)

    def test_one_that_is_larger_than_a_page_is_alone(self, raw: RawCalls, name: str) -> None:
        raw.call(
            "CreateAccumulator",
            Create(
                accumulator=ref("a", container=name),
                spec=spec(*[component(str(index), dims=[1]) for index in range(5000)]),
            ),
        )
        raw.call("CreateAccumulator", Create(accumulator=ref("b", container=name), spec=spec(component())))
        listing = messages_pb2.ListAccumulatorsRequest(container=name)
        found = pages(raw, "ListAccumulators", listing, "accumulators")
        assert [len(page) for page in found] == [1, 1]
        for each in "ab":
            raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(each, container=name)))


def test_layers_of_many_tags_come_on_several_pages(raw: RawCalls, name: str) -> None:
    tags = [f"tag {index}" for index in range(1000)]
    for index in range(3):
        request = create_request(f"{name}{index}", config=config(updates_collections=tags))
        raw.call("CreateBatchNormLayer", request)
    listing = layer_messages_pb2.ListBatchNormLayersRequest(scope=name)
    found = pages(raw, "ListBatchNormLayers", listing, "layers")
    assert [len(page) for page in found] == [1, 1, 1]
    assert [each.layer.name for page in found for each in page] == [f"{name}{index}" for index in range(3)]
    for index in range(3):
        raw.call(
            "DeleteBatchNormLayer",
            layer_messages_pb2.DeleteBatchNormLayerRequest(layer={"name": f"{name}{index}"}),
        )
