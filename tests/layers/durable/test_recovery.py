"""What a server finds when the one before it was killed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gradserve_server.layers.batch_norm.config import RandomAdjustment
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.batch_norm.registry import Reuse
from gradserve_server.layers.variables import NamedInitializer, Regularizer
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.runtime.event_loop import Turn
from gradserve_server.storage import journal as journal_module
from gradserve_server.storage.directory import StateError
from gradserve_server.storage.journal import Durability
from tests.journals import snapshots_written
from tests.layers.bench import KEY, LayerBench, bits, config_of
from tests.layers.durable.disk import LayerDisk
from tests.layers.test_events import CONFIGS, REMEMBERED, STEPS, Worker
from tests.storage.failing_disk import break_flushes, fill_disk


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[LayerDisk]:
    made = await LayerDisk.open(tmp_path / "state", remembered=REMEMBERED)
    yield made
    made.store.close()


def durable(layer: BatchNormLayer) -> dict[str, Any]:
    """Returns what a crash must not change."""
    pending = {each.forward_id: each.pending for each in layer.forwards if each.pending is not None}
    return {
        "incarnation": layer.incarnation,
        "creation_id": layer.creation_id,
        "config": layer.config,
        "variables": None if layer.variables is None else bits(layer.variables.by_name()),
        "num_updates": layer.num_updates,
        "num_draws": layer._state.num_draws,
        "counted": {name: (outcome.was_counted, outcome.draw) for name, outcome in layer.forwards.outcomes},
        "pending": {
            name: (each.implementation, bits({"mean": each.mean, "variance": each.variance}))
            for name, each in pending.items()
        },
    }


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("config", CONFIGS)
async def test_every_change_is_there_and_the_next_server_goes_on(disk: LayerDisk, config: str) -> None:
    worker = Worker(disk.bench, config)
    disks = [disk]
    for number, step in enumerate(STEPS.values()):
        try:
            await step(worker)
        except (NotFoundError, AbortedError):
            assert len(disks) > 1, "only forwards that were lost with a server are missing"
        if number in (2, 7, 12, len(STEPS) - 1):
            await disks[-1].store.flush()  # nobody waits for records of inference
            after = await disks[-1].after_crash()
            found = after.found()
            assert durable(found) == durable(worker.layer)
            assert all(each.saved is None for each in found.forwards)
            assert after.bench.memory.used == found.num_bytes
            assert after.bench.handles.used == len(found.forwards)
            after.bench.now = worker.bench.now
            disks.append(after)
            worker.bench, worker.layer = after.bench, found
    # The blobs of everything that was replaced are gone.
    await disks[-1].store.flush()
    tables = "SELECT blob FROM layer_variable UNION SELECT blob FROM layer_update"
    assert sorted(disks[-1].store.blobs) == sorted(blob for (blob,) in disks[-1].store.rows(tables))
    for each in disks[1:]:
        each.store.close()


@pytest.mark.parametrize("durability", [Durability.ROUND, Durability.GRADIENT])
@pytest.mark.parametrize(("config", "num_pending"), [("in place", 0), ("delayed", 1)])
async def test_forwards_count_once(tmp_path: Path, durability: Durability, config: str, num_pending: int) -> None:
    disk = await LayerDisk.open(tmp_path / "state", durability)
    worker = Worker(disk.bench, config)
    first = await worker.forward("a")
    after = await disk.after_crash()
    worker.layer = after.found()
    before = durable(worker.layer)
    again = await worker.forward("a")
    assert again.outputs.tobytes() == first.outputs.tobytes()
    assert again.has_pending_updates == bool(num_pending)
    assert durable(worker.layer) == before
    assert await worker.layer.run_updates(()) == num_pending
    assert await worker.layer.run_updates(()) == 0
    assert worker.layer.num_updates == 1
    for each in (disk, after):
        each.store.close()


async def test_what_backwards_need_is_lost_and_says_so(disk: LayerDisk) -> None:
    worker = Worker(disk.bench, "delayed")
    await worker.forward("a")
    await worker.forward("b")
    await worker.backward("b")
    await disk.store.flush()
    after = await disk.after_crash()
    worker.layer = after.found()
    with pytest.raises(NotFoundError, match="no forward 'a' is kept"):
        await worker.backward("a")
    with pytest.raises(AbortedError, match="the gradients of forward 'b' were computed already"):
        await worker.backward("b")
    await worker.forward("a")
    await worker.backward("a")
    after.store.close()


async def test_updates_that_were_released_are_not_run_later(disk: LayerDisk) -> None:
    worker = Worker(disk.bench, "delayed")
    await worker.forward("a")
    await worker.layer.release(("a",), with_updates=True)
    after = await disk.after_crash()
    assert await after.found().run_updates(()) == 0
    after.store.close()


async def test_every_argument(disk: LayerDisk) -> None:
    arguments: dict[str, Any] = {
        "decay": 0.5,
        "center": False,
        "scale": True,
        "epsilon": 0.25,
        "activation_fn": "relu",
        "param_initializers": {
            "gamma": NamedInitializer("normal", {"mean": 2.0}),
            "moving_mean": np.arange(3, dtype="bfloat16"),
            "moving_variance": np.array(2.0),
        },
        "param_regularizers": {"gamma": Regularizer("l1_l2", {"l1": 0.5})},
        "variables_collections": {"": ("b", "a"), "gamma": ("c",)},
        "outputs_collections": ("out",),
        "trainable": False,
        "fused": False,
        "data_format": "NCHW",
        "renorm": True,
        "renorm_clipping": {"rmax": float("inf"), "dmax": 1.0},
        "renorm_decay": 0.125,
        "adjustment": RandomAdjustment((0.5, 1.5), (-1.0, 1.0)),
        "renorm_zero_debias": True,
    }
    key = ResourceKey("c", "net/ü \n")
    lifetime = Lifetime(owner="somebody", idle_lease=5.0)
    config = config_of(**arguments)
    shape = (np.dtype(np.float32), (-1, 3))
    layer, _ = await disk.bench.registry.create_built(key, config, Reuse.ALLOWED, "made", *shape, lifetime)
    await disk.journals.settle()
    after = await disk.after_crash()
    found = after.found(key)
    assert durable(found) == durable(layer)
    assert found.variables is not None
    assert found.num_bytes == layer.num_bytes
    registry = after.bench.registry
    assert registry.create(key, config, Reuse.FORBIDDEN, "made", lifetime) == (found, False)
    assert registry.page("c", "", 9, scope="", collection="out") == [(key, found)]
    assert registry.lifetime(key) == lifetime
    after.bench.now = 6.0
    after.bench.lifetimes.expire(Turn(100))
    with pytest.raises(NotFoundError):
        after.found(key)
    await after.store.flush()
    assert after.store.blobs == []
    after.store.close()


async def test_what_was_deleted_stays_deleted(disk: LayerDisk) -> None:
    worker = Worker(disk.bench, "delayed")
    await worker.forward("a")
    assert disk.bench.registry.delete(KEY)
    await disk.journals.settle()
    # Calls that are under way end as if the layer were still there.
    await worker.forward("b")
    after = await disk.after_crash()
    with pytest.raises(NotFoundError):
        after.found()
    assert after.store.blobs == []
    after.store.close()


async def test_of_two_that_are_built_at_once_one_is_written(disk: LayerDisk) -> None:
    created = await asyncio.gather(
        *(
            disk.bench.registry.create_built(KEY, config_of(), Reuse.ALLOWED, "", np.dtype(np.float32), (2, 3))
            for _ in range(2)
        )
    )
    assert sorted(is_new for _, is_new in created) == [False, True]
    await disk.journals.settle()
    assert len(disk.store.rows("SELECT * FROM layer")) == len(disk.store.blobs) == 1
    free = disk.store.segments.num_free
    assert disk.store.segments.num_bytes - free == 4096, "the space for the other one was given back"
    after = await disk.after_crash()
    assert durable(after.found()) == durable(disk.found())
    after.store.close()


async def test_nothing_is_written_for_none(disk: LayerDisk) -> None:
    layer = await disk.create(durability=Durability.NONE)
    await layer.build(np.dtype(np.float32), (2, 3))
    assert disk.store.rows("SELECT * FROM layer") == []
    assert disk.store.blobs == []


async def test_the_default_and_what_differs_from_it(disk: LayerDisk) -> None:
    layer = await disk.create()
    assert layer.config.durability is Durability.ROUND
    assert await disk.create() is layer
    with pytest.raises(AlreadyExistsError, match="durability is ROUND, not GRADIENT"):
        await disk.create(durability=Durability.GRADIENT)
    with pytest.raises(InvalidArgumentError, match="expected NONE, as the server has no state directory, got ROUND"):
        LayerBench().layer(durability=Durability.ROUND)


async def test_limits_that_are_less_than_what_there_is(disk: LayerDisk) -> None:
    layer = await disk.create()
    await layer.build(np.dtype(np.float32), (2, 3))
    await disk.create(ResourceKey("c", "other"))
    disk.limits = {"max_layers": 1}
    with pytest.raises(ResourceExhaustedError, match="layers"):
        await disk.after_crash()


async def test_variables_that_do_not_fit_into_memory(disk: LayerDisk) -> None:
    layer = await disk.create()
    await layer.build(np.dtype(np.float32), (2, 3))
    disk.limits = {"limit": 35}
    with pytest.raises(ResourceExhaustedError, match="memory"):
        await disk.after_crash()


@pytest.mark.parametrize("config", ["in place", "delayed"])
async def test_many_events_become_one_state(disk: LayerDisk, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_EVENTS", 10)
    worker = Worker(disk.bench, config)
    for number in range(40):
        await worker.forward(f"f{number}", lease=100)
        if number % 3 == 0:
            await worker.backward(f"f{number}")
        if number % 7 == 0:
            await worker.layer.run_updates(())
    await snapshots_written(disk.journals)
    ((count,),) = disk.store.rows("SELECT count(*) FROM layer_event")
    assert count <= 20
    after = await disk.after_crash()
    assert durable(after.found()) == durable(worker.layer)
    assert after.found().forwards.outcomes[-1] == worker.layer.forwards.outcomes[-1]
    last = await after.after_crash()
    assert durable(last.found()) == durable(worker.layer)
    for each in (after, last):
        each.store.close()


# --- Faults


async def test_a_full_disk_refuses_changes_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = await LayerDisk.open(tmp_path / "state")
    worker = Worker(disk.bench, "delayed")
    await worker.forward("a")
    before = durable(worker.layer)

    fill_disk(monkeypatch)
    for change in (worker.forward("b"), worker.layer.run_updates(()), worker.set_beta()):
        with pytest.raises(ResourceExhaustedError, match="no space in the state directory"):
            await change
    with pytest.raises(ResourceExhaustedError, match="no space in the state directory"):
        await disk.bench.registry.create_built(
            ResourceKey("c", "new"), config_of(), Reuse.ALLOWED, "", np.dtype(np.float32), (2, 3)
        )
    assert durable(worker.layer) == before
    monkeypatch.undo()
    await worker.forward("b")
    assert await worker.layer.run_updates(()) == 2
    await worker.set_beta()
    after = await disk.after_crash()
    assert durable(after.found()) == durable(worker.layer)
    assert len(after.bench.registry.page("c", "", 9, scope="", collection="")) == 0
    for each in (disk, after):
        each.store.close()


async def test_nobody_sees_a_change_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = await LayerDisk.open(tmp_path / "state")
    worker = Worker(disk.bench, "in place")
    await worker.forward("a")
    before = durable(worker.layer)

    break_flushes(monkeypatch)
    with pytest.raises(UnavailableError, match=r"the server stops: .*the state cannot be written: .*Input/output"):
        await worker.forward("b")
    assert durable(worker.layer) == before
    assert len(disk.failures) == 1
    monkeypatch.undo()
    disk.store.close()


@pytest.mark.parametrize("num_cancelled", [1, 2])
async def test_a_change_that_is_being_written_takes_effect_though_its_call_is_cancelled(
    disk: LayerDisk, num_cancelled: int
) -> None:
    worker = Worker(disk.bench, "in place")
    await worker.forward("a")
    call = asyncio.ensure_future(worker.set_beta())
    # Holds up the thread that writes.
    with disk.store._arrived:
        while not disk.store._entries:
            await asyncio.sleep(0)
        for _ in range(num_cancelled):
            call.cancel()
            await asyncio.sleep(0)
        assert not call.done()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert set(worker.layer.get_variables(["beta"])["beta"].tolist()) == {0.25}
    after = await disk.after_crash()
    assert durable(after.found()) == durable(worker.layer)
    after.store.close()


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("layer", "config", "{}"),
        ("layer", "config", "no json"),
        ("layer", "lifetime", '{"owner": 3, "more": 4}'),
        ("layer_event", "record", '{"event": "surprise"}'),
        ("layer_event", "record", "[]"),
        ("layer_event", "record", '{"event": "adjustment_drawn"}'),
        ("layer_state", "record", "{}"),
        ("layer_state", "record", '{"num_updates": 1, "num_draws": 0, "forwards": [["a"]], "fates": []}'),
        ("layer_variable", "name", "alpha"),
        ("layer_variable", "place", "17"),
        ("layer_update", "implementation", "NONE"),
        ("layer_update", "forward", "another"),
        ("blob", "arrays", '[["float99", [2]]]'),
    ],
)
async def test_records_that_are_damaged(tmp_path: Path, table: str, column: str, value: str) -> None:
    disk = await LayerDisk.open(tmp_path / "state")
    worker = Worker(disk.bench, "delayed")
    await worker.forward("a")
    disk.store.close()
    disk = await LayerDisk.open(tmp_path / "state")
    worker.layer = disk.found()
    await worker.forward("b")
    disk.store.close()
    disk = LayerDisk(tmp_path / "state", Durability.ROUND)
    if (table, column) in (("layer_variable", "name"), ("layer_update", "forward")):
        where = "WHERE name = 'beta'" if table == "layer_variable" else "WHERE forward = 'a'"
        disk.store._database.execute(f"UPDATE {table} SET {column} = ? {where}", (value,))
    else:
        disk.store._database.execute(f"UPDATE {table} SET {column} = ?", (value,))
    disk.store.close()
    expected = r"state: the record of layer 'test/layer' cannot be used: "
    if table == "blob":
        expected = r"state/metadata.sqlite: blob \d is damaged: "
    with pytest.raises(StateError, match=expected):
        await LayerDisk.open(tmp_path / "state")


async def test_records_are_json(disk: LayerDisk) -> None:
    worker = Worker(disk.bench, "random")
    await worker.forward("a")
    await disk.store.flush()
    for table, column in (("layer", "config"), ("layer_event", "record")):
        for (text,) in disk.store.rows(f"SELECT {column} FROM {table}"):
            assert isinstance(json.loads(text), dict)
