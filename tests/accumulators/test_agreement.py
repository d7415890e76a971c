"""What all who create or find an accumulator must agree on: equal for everybody, whichever client they use."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_server.accumulators.spec import agreement_differences
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.bad_input.requests import Create, component, ref, spec
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP

RUN = {"num_required": "3", "optimizer": "sgd"}

OTHERS = (
    "workers of gradserve.torch, gradserve.jax and gradserve.training share a run with each other, not with workers "
    "that make the calls themselves, as these exchange the parameters in another way; with parameters that the server "
    "holds (client.parameters), all can: see docs/other_languages.md#which-workers-can-share-a-run"
)
DIFFERENT: dict[str, tuple[dict[str, str] | None, str]] = {
    "another value": ({**RUN, "num_required": "4"}, "agreement['num_required'] is '3', not '4'"),
    "one less": ({"num_required": "3"}, "agreement['optimizer'] is 'sgd', not absent"),
    "one more": ({**RUN, "rate": "0.1"}, "agreement['rate'] is absent, not '0.1'"),
    "an empty value": ({**RUN, "rate": ""}, "agreement['rate'] is absent, not ''"),
    "all different": (
        {"num_required": "4", "optimiser": "sgd"},
        "agreement['num_required'] is '3', not '4'; agreement['optimiser'] is absent, not 'sgd'; "
        "agreement['optimizer'] is 'sgd', not absent",
    ),
    "none": (
        None,
        f"agreement['num_required'] is '3', not absent; agreement['optimizer'] is 'sgd', not absent; {OTHERS}",
    ),
    "an empty one": (
        {},
        f"agreement['num_required'] is '3', not absent; agreement['optimizer'] is 'sgd', not absent; {OTHERS}",
    ),
}

KINDS = ["dense", "sparse", "model"]


def make(client: Any, kind: str, name: str, **options: Any) -> Any:
    """Creates or finds an accumulator with either client; that of `gradserve.aio` returns something to await."""
    match kind:
        case "dense":
            return client.conditional_accumulator("float32", (2,), shared_name=name, **options)
        case "sparse":
            return client.sparse_conditional_accumulator("float32", (9, 2), shared_name=name, **options)
        case _:
            return client.gradient_accumulator({"w": np.zeros(2)}, name, **options)


@pytest.fixture(params=["blocking", "aio"])
async def made_by(request: pytest.FixtureRequest, server_address: str) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """What makes an accumulator with one of the clients."""
    if request.param == "blocking":
        with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as client:

            async def make_blocking(*args: Any, **options: Any) -> gradserve.AccumulatorInfo:
                return make(client, *args, **options).info()  # type: ignore[no-any-return]

            yield make_blocking
    else:
        async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as aio_client:

            async def make_aio(*args: Any, **options: Any) -> gradserve.AccumulatorInfo:
                return await (await make(aio_client, *args, **options)).info()  # type: ignore[no-any-return]

            yield make_aio


class TestClients:
    @pytest.mark.parametrize("kind", KINDS)
    async def test_equal_ones_find_it(self, made_by: Callable[..., Any], kind: str, name: str) -> None:
        first = await made_by(kind, name, agreement=RUN)
        again = await made_by(kind, name, agreement=dict(reversed(RUN.items())))
        assert first.agreement == again.agreement == RUN

    @pytest.mark.parametrize("case", DIFFERENT)
    @pytest.mark.parametrize("kind", KINDS)
    async def test_others_learn_what_differs(
        self, made_by: Callable[..., Any], kind: str, case: str, name: str
    ) -> None:
        agreement, differences = DIFFERENT[case]
        await made_by(kind, name, agreement=RUN)
        with pytest.raises(gradserve.AlreadyExistsError) as refusal:
            await made_by(kind, name, agreement=agreement)
        assert refusal.value.message == f"accumulator 'default/{name}' exists with another spec: {differences}"
        assert (await made_by(kind, name, agreement=RUN)).agreement == RUN

    async def test_none_and_an_empty_one_are_the_same(self, made_by: Callable[..., Any], name: str) -> None:
        assert (await made_by("dense", name)).agreement == {}
        assert (await made_by("dense", name, agreement={})).agreement == {}
        with pytest.raises(gradserve.AlreadyExistsError, match=r"agreement\['a'\] is absent, not 'b'"):
            await made_by("dense", name, agreement={"a": "b"})

    @pytest.mark.parametrize(
        ("agreement", "message"),
        [
            ({"num_required": 3}, "expected text for agreement['num_required'], got 3"),
            ({"num_required": None}, "expected text for agreement['num_required'], got None"),
            ({3: "x"}, "expected names as keys for agreement, got 3"),
            ([("num_required", "3")], "expected a dict by name for agreement, got [('num_required', '3')]"),
            ("num_required=3", "expected a dict by name for agreement, got 'num_required=3'"),
        ],
    )
    async def test_what_is_no_agreement(
        self, made_by: Callable[..., Any], name: str, agreement: Any, message: str
    ) -> None:
        with pytest.raises(gradserve.InvalidArgumentError) as refusal:
            await made_by("dense", name, agreement=agreement)
        assert (refusal.value.message, refusal.value.field) == (message, "agreement")

    def test_it_is_listed(self, client: gradserve.Client, name: str) -> None:
        for number in range(2):
            make(client, "dense", f"a{number}", container=name, agreement={"number": str(number)})
        assert [each.agreement for each in client.list_accumulators(name)] == [{"number": "0"}, {"number": "1"}]

    def test_the_largest_that_is_allowed(self, client: gradserve.Client, name: str) -> None:
        largest = {f"{number:02}" + "é" * 511: "é" * 512 for number in range(64)}
        assert make(client, "dense", name, agreement=largest).info().agreement == largest


def create(raw: RawCalls, name: str, agreement: dict[str, str]) -> messages_pb2.CreateAccumulatorResponse:
    reply: messages_pb2.CreateAccumulatorResponse = raw.call(
        "CreateAccumulator", Create(accumulator=ref(name), spec=spec(component(), agreement=agreement))
    )
    return reply


def test_creation_and_description_through_the_service(server_address: str, name: str) -> None:
    """Refusals are in the tables of bad input."""
    with RawCalls(server_address) as raw:
        made = create(raw, name, RUN)
        assert (made.created, dict(made.info.spec.agreement)) == (True, RUN)
        found = create(raw, name, RUN)
        assert (found.created, dict(found.info.spec.agreement)) == (False, RUN)
        described = raw.call("GetAccumulator", messages_pb2.GetAccumulatorRequest(accumulator=ref(name)))
        assert dict(described.info.spec.agreement) == RUN


@pytest.mark.parametrize("num_components", [1, 5000])
def test_it_is_described_beside_any_number_of_components(
    client: gradserve.Client, name: str, num_components: int
) -> None:
    """Those of many are serialized piece by piece."""
    model = {f"w{index}": gradserve.DenseSpec("float32", ()) for index in range(num_components)}
    assert client.gradient_accumulator(model, name, agreement=RUN).info().agreement == RUN
    assert [each.agreement for each in client.list_accumulators() if each.name == name] == [RUN]
    client.delete_accumulator(name)


def test_only_some_of_many_differences_are_named() -> None:
    theirs = {f"{number:02}": "x" * 1024 for number in range(12)}
    found = agreement_differences({}, theirs)
    assert found[0] == f"agreement['00'] is absent, not '{'x' * 100}'..."
    assert len(found) == 11
    assert found[-1] == "and more of the agreement"
    assert agreement_differences(theirs, dict(theirs)) == []


@pytest.mark.parametrize("durability", ["round", "gradient"])
def test_it_outlives_the_server(tmp_path: Path, durability: Literal["round", "gradient"]) -> None:
    config = ServerConfig(
        state=StateConfig(state_dir=str(tmp_path / "state"), durability=durability), runtime=NOT_WARMED_UP
    )
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        make(client, "model", "net", agreement=RUN)
        make(client, "dense", "plain")
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        assert {each.name: each.agreement for each in client.list_accumulators()} == {"net": RUN, "plain": {}}
        with pytest.raises(gradserve.AlreadyExistsError, match=r"agreement\['num_required'\] is '3', not '4'"):
            make(client, "model", "net", agreement={**RUN, "num_required": "4"})
        assert make(client, "model", "net", agreement=RUN).info().agreement == RUN
