"""Packed updates and versions between clients and servers: on every way, every arithmetic, trees and clusters."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import codecs, reductions
from gradserve.transport.settings import TransportName
from gradserve_protocol.arrays import BFLOAT16
from gradserve_protocol.codecs import CODECS
from gradserve_protocol.digest import digest_of
from tests.cluster.servers import addresses_of, name_at, running_cluster
from tests.cluster.sharding.clients import small_pieces
from tests.servers.restarting import RestartingServer
from tests.trees.servers import running_tree
from tests.trees.workers import clients_of

WAYS: tuple[TransportName, ...] = ("shared_memory", "bulk", "grpc")
RANDOM = np.random.default_rng(3)
SHAPES: dict[str, tuple[int, ...]] = {"w": (40, 130), "b": (7,), "one": ()}
VALUES: dict[str, Any] = {
    "w": np.zeros(SHAPES["w"], np.float32),
    "b": np.zeros(SHAPES["b"], np.float64),
    "one": np.zeros(SHAPES["one"], BFLOAT16),
}
by_codec = pytest.mark.parametrize("codec", CODECS)


def an_update() -> dict[str, Any]:
    """Returns values that bfloat16 has, so that no conversion of a component changes them."""
    return {
        name: RANDOM.normal(size=shape).astype(BFLOAT16).astype(VALUES[name].dtype) for name, shape in SHAPES.items()
    }


def unpacked(update: dict[str, Any], codec: str) -> dict[str, Any]:
    """Returns what a server unpacks of an update."""
    found = {}
    for name, value in update.items():
        decoded = CODECS[codec].decode(CODECS[codec].encode(value), value.size).reshape(value.shape)
        found[name] = decoded.astype(np.float64) if value.dtype == np.float64 else decoded
    return found


def wide(values: Any) -> dict[str, Any]:
    """Returns components in the dtypes of their masters."""
    return {name: value.astype(np.float64 if name == "b" else np.float32) for name, value in values.items()}


def assert_equal(one: Any, other: Any) -> None:
    for name in VALUES:
        assert np.array_equal(one[name], other[name]), name


SPECS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "clipped": {"clip_norm": 30.0},
    "deterministic": {"deterministic": True},
    "median": {"reduction": "median"},
    "krum": {"reduction": reductions.krum(0)},
}


@by_codec
@pytest.mark.parametrize("spec", SPECS)
def test_packed_updates_give_the_bits_of_unpacked_ones(
    client: gradserve.Client, name: str, codec: str, spec: str
) -> None:
    """Components of 16 bits are wide here: uncompressed updates of theirs would be rounded."""
    options = {"num_required": 3, **SPECS[spec]}
    packed = client.parameters(VALUES, shared_name=name, **options)
    plain = client.parameters(wide(VALUES), shared_name=f"{name}-plain", **options)
    updates = [an_update() for _ in range(3)]
    for index, update in enumerate(updates):
        how: dict[str, Any] = {"weight": 1.0 + index, "worker_id": f"worker {index}"}
        is_packed = index != 1 or spec == "krum"
        packed.push(update, 0, codec=codec if is_packed else None, **how)
        plain.push(unpacked(update, codec) if is_packed else wide(update), 0, **how)
    version, expected = packed.read(1), plain.read(1)
    assert_equal(version, {each: expected[each].astype(VALUES[each].dtype) for each in VALUES})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [5000, 2_000_000])
@by_codec
def test_every_way(server_address: str, name: str, way: TransportName, size: int, codec: str) -> None:
    down = codec if CODECS[codec].packs_versions else None
    with gradserve.connect(server_address, transport=way) as client:
        stored = len(client.list_tensors())
        made = client.parameters({"w": np.zeros(size, np.float32)}, shared_name=name)
        update = RANDOM.normal(size=size).astype(np.float32)
        result = made.push_pull({"w": update}, 0, codec=codec, codec_down=down, copy=way == "grpc")
        version = made.read()
        assert np.array_equal(version["w"], CODECS[codec].decode(CODECS[codec].encode(update), size))
        received = result.version["w"]
        if down is not None:
            assert np.array_equal(received, CODECS[codec].decode(CODECS[codec].encode(version["w"]), size))
        assert result.version.codec == (None if down is None else codecs.Codec(codec))
        assert result.version.digest == version.digest == digest_of([version["w"]]).hex()
        assert received.flags.writeable == (way == "grpc")
        assert len(client.list_tensors()) == stored
        made.delete()


@pytest.mark.parametrize(
    ("codec", "part"), [("bf16", 1.99), ("int8", 3.9), ("int4", 7.1), ("e3m0", 7.5), ("topk", 120)]
)
def test_bytes_on_the_wire(server_address: str, name: str, codec: str, part: float) -> None:
    """A million float32 take 4 MB."""
    size = 1 << 20
    with gradserve.connect(server_address, transport="grpc") as client:
        made = client.parameters({"w": np.zeros(size, np.float32)}, shared_name=name)
        sizes: list[tuple[int, int]] = []
        made.push({"w": np.ones(size, np.float32)}, 0, codec=codec, progress=lambda *each: sizes.append(each))
        (update,) = made.rounds()[0].updates
        assert update.num_bytes <= 4 * size / part
        assert sizes[-1][1] <= 4 * size / part
        made.delete()


def test_versions_are_packed_once_for_all_readers(client: gradserve.Client, name: str) -> None:
    values: dict[str, Any] = {
        "w": RANDOM.normal(size=100_000).astype(np.float32),
        "half": RANDOM.normal(size=300).astype(np.float16),
    }
    made = client.parameters(values, shared_name=name)
    before = made.info().num_bytes
    for codec in ("int8", codecs.int8(), codecs.bf16(), codecs.int4(), codecs.e3m0()):
        packing = CODECS[codec if isinstance(codec, str) else codec.name]
        for version in (made.read(codec=codec), made.read(0, codec=codec)):
            for each, value in values.items():
                expected = packing.decode(packing.encode(value), value.size).astype(value.dtype)
                assert np.array_equal(version[each], expected)
            assert version.digest == made.read().digest
    latest = [CODECS[each].num_bytes(value.size) for each in ("int4", "e3m0") for value in values.values()]
    assert made.info().num_bytes == before + sum(latest)  # those of two codecs are kept


async def test_asyncio(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        made = await client.parameters({"w": np.zeros(100, np.float32)}, shared_name=name)
        result = await made.push_pull({"w": np.ones(100, np.float32)}, 0, codec="int4", codec_down="bf16")
        assert result.version["w"].tolist() == [1.0] * 100
        assert (await made.read(codec="int8"))["w"].tolist() == [1.0] * 100


@by_codec
@pytest.mark.parametrize("durability", ["gradient", "round"])
def test_updates_survive_a_crash(tmp_path: Path, codec: str, durability: str) -> None:
    """They are recorded unpacked, or the client sends them again as they were."""
    with RestartingServer(tmp_path / "state") as server, gradserve.connect(server.address) as client:
        made = client.parameters(VALUES, shared_name="p", num_required=2, durability=durability)
        updates = [an_update(), an_update()]
        made.push(updates[0], 0, worker_id="a", codec=codec)
        server.restart()
        made.push(updates[1], 0, worker_id="b", codec=codec)
        first, second = (unpacked(each, codec) for each in updates)
        halved = {each: -(-(first[each] + second[each]) / first[each].dtype.type(2)) for each in VALUES}
        assert_equal(made.read(1), {each: halved[each].astype(VALUES[each].dtype) for each in VALUES})


def in_rounds(client: gradserve.Client, others: gradserve.Client, name: str, **properties: Any) -> list[Any]:
    """Returns the versions of three rounds of two workers, which send and receive packed."""
    random = np.random.default_rng(5)
    made, other = (each.parameters(VALUES, name, num_required=2, **properties) for each in (client, others))
    versions = []
    for step in range(3):
        first, second = (
            {each: random.normal(size=shape).astype(VALUES[each].dtype) for each, shape in SHAPES.items()} for _ in "ab"
        )
        with ThreadPoolExecutor(1) as beside:
            pushed = beside.submit(made.push_pull, first, step, worker_id="a", codec="e3m0", weight=2.0)
            result = other.push_pull(second, step, worker_id="b", codec="int4", codec_down="int8")
            assert pushed.result().outcome is gradserve.ACCEPTED
        assert result.version.codec == codecs.int8()
        versions += [made.read(step + 1), result.version]
    return versions


def test_an_aggregator_adds_packed_updates_up(name: str) -> None:
    found = []
    with (
        running_tree(2) as (top, near),
        clients_of(near.address, 2) as (first, second),
        clients_of(top.address, 2) as (third, fourth),
    ):
        found = [in_rounds(*each) for each in ((first, second, name), (third, fourth, f"{name}-direct"))]
    for here, there in zip(*found, strict=True):
        assert here.digest == there.digest
        assert_equal(here, there)


def test_an_aggregator_passes_a_packed_update_on_alone(name: str) -> None:
    with running_tree(2) as (top, near), clients_of(near.address, 1) as (client,), clients_of(top.address, 1) as (up,):
        made = client.parameters(VALUES, name, deterministic=True)
        update = an_update()
        result = made.push_pull(update, 0, worker_id="a", codec="int8", codec_down="bf16")
        expected = {each: value.astype(VALUES[each].dtype) for each, value in unpacked(update, "int8").items()}
        there = up.parameters(shared_name=name)
        assert_equal(there.read(), expected)
        assert result.version.digest == there.read().digest
        assert there.rounds()[0].updates[0].num_bytes == sum(
            [CODECS["int8"].num_bytes(value.size) for value in update.values()]
        )


def test_pieces_of_sharded_parameters_are_packed_by_themselves() -> None:
    with (
        small_pieces(),
        running_cluster(2) as servers,
        gradserve.connect(addresses_of(servers)) as client,
        gradserve.connect(addresses_of(servers)) as other,
    ):
        name = name_at(0, 2)
        in_rounds(client, other, name, sharded=True)
        made = client.parameters(VALUES, name, sharded=True)
        before = made.read()
        update = {each: np.full(shape, 0.5, VALUES[each].dtype) for each, shape in SHAPES.items()}
        made.push(update, before, worker_id="a", codec="int8")
        result = made.push_pull(update, before, worker_id="b", codec="int8", codec_down="bf16")
        after = made.read()
        for each in ("w", "b"):  # the master of the other one is not rounded
            assert np.array_equal(after[each], before[each] + update[each])
        assert (result.version.codec, result.version.digest) == (codecs.bf16(), "")
        for each in VALUES:
            assert np.allclose(result.version[each].astype(float), after[each].astype(float), rtol=2**-8, atol=0)


MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no codec": ({"codec": "int7"}, "codec", "gradserve.codecs"),
    "a number": ({"codec": 8}, "codec", "gradserve.codecs"),
    "for updates": ({"codec_down": "topk"}, "codec_down", "for versions"),
    "at random": ({"codec_down": codecs.e3m0(stochastic=True)}, "codec_down", "for versions"),
    "not finite": ({"codec": "int8", "update": {"w": np.full(SHAPES["w"], np.inf)}}, "update['w']", "finite"),
    "not finite in bf16": ({"codec": "bf16", "update": {"w": np.full(SHAPES["w"], np.inf)}}, "update['w']", "finite"),
    "too large": ({"codec": "int4", "update": {"b": np.full(7, 1e6)}}, "update['b']", "at most 65504"),
    "another shape": ({"codec": "int8", "update": {"w": np.zeros((130, 40))}}, "update['w']", "Shape mismatch"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(client: gradserve.Client, name: str, mistake: str) -> None:
    arguments, field, match = MISTAKES[mistake]
    made = client.parameters(VALUES, shared_name=name)
    with pytest.raises(gradserve.InvalidArgumentError, match=match) as caught:
        made.push_pull(**{"update": an_update(), "local_step": 0, **arguments})
    assert caught.value.field == field
    assert made.info().weights.accepted == 0


def test_handles_are_not_packed(client: gradserve.Client, name: str) -> None:
    made = client.parameters(VALUES, shared_name=name)
    with pytest.raises(gradserve.InvalidArgumentError, match="expected arrays with a codec") as caught:
        made.push({"b": client.put(np.zeros(7))}, 0, codec="int8")
    assert caught.value.field == "update['b']"


def test_a_version_that_a_codec_does_not_have(client: gradserve.Client, name: str) -> None:
    made = client.parameters({"w": np.full(3, 1e6)}, shared_name=name)
    with pytest.raises(gradserve.InvalidArgumentError, match="component 'w' of the version: .*at most 65504") as caught:
        made.read(codec="int4")
    assert caught.value.field == "codec"
    assert made.read(codec="bf16")["w"].tolist() == [999424.0] * 3


@pytest.mark.parametrize(
    ("arguments", "field"), [({"name": "int9"}, "name"), ({"name": "int8", "stochastic": True}, "stochastic")]
)
def test_codecs_check_their_settings(arguments: Any, field: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as caught:
        codecs.Codec(**arguments)
    assert caught.value.field == field
