"""DiLoCo with `data`: each sample is in one update that counts, once per epoch, whatever happens to the workers."""

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradserve
from gradserve.data import Batches, sampler, stream
from gradserve.training.diloco.plan import Plan
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.restarting import RestartingServer
from tests.training.sharing import BATCH_SIZE, NUM_SAMPLES, SYNC_EVERY, Trained, assert_once, samples

ACTS = st.sampled_from(["take", "push", "die", "return", "return with another id"])


@pytest.mark.parametrize("num_required", [1, 2])
@settings(max_examples=15, deadline=None)
@given(acts=st.lists(st.tuples(st.integers(0, 3), ACTS), max_size=24))
def test_workers_come_die_return_and_are_late(
    server_address: str, num_required: int, acts: list[tuple[int, str]]
) -> None:
    """Rounds of one update, or of two: there, the call of the first one gives up, and the second one ends the round."""
    name = uuid.uuid4().hex
    options: dict[str, Any] = {"num_required": num_required, "timeout": None if num_required == 1 else 0.02}
    ids = {number: f"w{number}" for number in range(4)}
    present, dead, with_batches = dict[int, Trained](), list[Trained](), set[int]()
    with gradserve.connect(server_address) as client:

        def begin(number: int) -> None:
            before = next((each for each in dead if each.worker.worker_id == ids[number]), None)
            present[number] = Trained(client, name, ids[number], **options)
            if before is not None:  # an update of it may still count, and must have had the same samples
                present[number].updates = before.updates

        for number, act in acts:
            if act in ("die", "return", "return with another id") and number in present:
                dead.append(present.pop(number))
                with_batches.discard(number)
            if act == "return with another id":
                ids[number] += "'"
            if act != "die" and number not in present:
                begin(number)
            if act == "take" or (act == "push" and number not in with_batches):
                present[number].take()
                with_batches.add(number)
            if act == "push":
                present[number].push()
                with_batches.discard(number)
        keepers = [Trained(client, name, f"keeper-{each}", **options) for each in range(num_required)]
        for each in keepers:
            each.train()
        assert_once(client, name, keepers, *present.values(), *dead)


@pytest.fixture
def shared(client: gradserve.Client, name: str) -> Any:
    """Makes workers of a run."""
    return lambda worker_id, **options: Trained(client, name, worker_id, **options)


def test_batches_of_an_update_that_was_too_late_come_again(client: gradserve.Client, name: str, shared: Any) -> None:
    slow, fast = shared("slow"), shared("fast")
    slow.take()
    fast.train()
    fast.train()
    slow.push()  # dropped
    assert (slow.worker.version, slow.data.state_dict()) == (2, fast.data.state_dict())
    assert fast.updates[1] == slow.updates[0], "the first samples that had not counted"
    assert_once(client, name, [fast], slow)


def test_a_worker_that_dies_with_an_update_that_counts(client: gradserve.Client, name: str, shared: Any) -> None:
    """It comes back under its id, and takes the same samples: its second update does not count."""
    options = {"num_required": 2, "timeout": 0.05}
    first, other = shared("w0", **options), shared("w1", **options)
    first.train()  # gives up, but the server has it
    again = shared("w0", **options)
    again.take()
    assert again.updates[0] == first.updates[0]
    other.train()
    again.push()
    assert (again.worker.version, again.data.num_counted) == (1, 2 * SYNC_EVERY * BATCH_SIZE)
    again.updates |= first.updates
    assert_once(client, name, [again, other])


@pytest.mark.parametrize("keep_rounds", [1, 1000])
def test_one_that_joins_or_has_missed_many_rounds(
    client: gradserve.Client, name: str, shared: Any, keep_rounds: int
) -> None:
    """By the records of rounds, or by what another worker has written down if they are no longer kept."""
    slow, fast = shared("slow", keep_rounds=keep_rounds), shared("fast", keep_rounds=keep_rounds)
    slow.take()
    for _ in range(7):
        fast.train()
    slow.push()
    joined = shared("joined", keep_rounds=keep_rounds)
    assert joined.data.state_dict() == slow.data.state_dict() == fast.data.state_dict()
    if keep_rounds > 1:
        assert_once(client, name, [joined], slow, fast)


def test_a_new_run_begins_with_a_checkpoint_of_another_one(client: gradserve.Client, name: str, shared: Any) -> None:
    before = samples()
    before.load_state_dict(before.state_dict() | {"step": 30, "first": 4})
    first, second = shared("a", data=before), shared("b")
    assert second.data.state_dict() == first.data.state_dict()
    assert (first.worker.version, first.data.step) == (0, 0)
    assert first.data.num_counted == 4 * SYNC_EVERY * BATCH_SIZE
    first.train()
    assert first.data.num_counted == 5 * SYNC_EVERY * BATCH_SIZE


@pytest.mark.parametrize("durability", ["none", "round"])
def test_a_server_that_starts_again(tmp_path: Path, name: str, durability: str) -> None:
    """With its state, or without: then the update that it lost is made once more, from the same version."""
    with RestartingServer(tmp_path) as server, gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        worker = Trained(client, name, "w0", durability=durability)
        worker.train()
        worker.take()
        server.restart()
        worker.push()
        if durability == "none":
            assert worker.worker.num_failed == 1
            worker.train()
        assert (worker.worker.version, worker.data.step) == (2, 2)
        assert worker.data.num_counted == 2 * SYNC_EVERY * BATCH_SIZE
        joined = Trained(client, name, "w1", durability=durability)
        assert joined.data.state_dict() == worker.data.state_dict()


def test_parameters_with_other_values(client: gradserve.Client, name: str, shared: Any, tmp_path: Path) -> None:
    worker = shared("w0")
    worker.train()
    parameters = client.parameters(shared_name=name)
    parameters.save(tmp_path / "saved")
    parameters.load(tmp_path / "saved")
    worker.take()
    with pytest.raises(gradserve.AbortedError, match="other values were loaded"):
        worker.push()


def test_all_have_the_same_data(client: gradserve.Client, name: str, shared: Any) -> None:
    shared("w0")
    other = sampler(NUM_SAMPLES, seed=6, batch_size=BATCH_SIZE, batches_per_step=SYNC_EVERY)
    with pytest.raises(gradserve.AlreadyExistsError, match="shuffled by seed 5.*shuffled by seed 6"):
        shared("w1", data=other)
    with pytest.raises(gradserve.AlreadyExistsError, match="agreement on 'data'"):
        client.parameters({"w": np.zeros(1)}, shared_name=name, agreement={"sync_every": str(SYNC_EVERY)})


def test_a_stream(client: gradserve.Client, name: str) -> None:
    def lines() -> Batches[int]:
        return stream(lambda _epoch: range(NUM_SAMPLES), batch_size=BATCH_SIZE, batches_per_step=SYNC_EVERY)

    first = Trained(client, name, "w0", lines())
    for _ in range(4):
        first.train()
    second = Trained(client, name, "w1", lines())
    second.train()
    first.train()
    assert_once(client, name, [second, first])


def test_an_update_without_its_batches(shared: Any) -> None:
    worker = shared("w0")
    next(iter(worker.data))
    with pytest.raises(gradserve.InvalidArgumentError, match="expected 2 batches") as failure:
        worker.push()
    assert failure.value.field == "data"


@pytest.mark.parametrize(
    ("how", "field", "message"),
    [
        ({"num_fragments": 2}, "fragments", "one fragment with data"),
        ({"delay": 1}, "fragment_sync_delay", "no delay with data"),
        ({"alpha": 0.5}, "fragment_update_alpha", "0 with data"),
        ({"on_failure": "continue"}, "on_failure", "'reset' with data"),
        ({"data": sampler(9, seed=0, batch_size=1)}, "data", "batches_per_step to be sync_every, 2, or a multiple"),
        ({"data": range(9)}, "data", "what gradserve.data.sampler or stream has returned"),
    ],
)
def test_plans_by_which_samples_would_not_count_once(how: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as failure:
        Plan(SYNC_EVERY, **{"data": samples()} | how)
    assert failure.value.field == field
    assert message in failure.value.message


def test_late_updates_that_would_count(shared: Any) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="0 with data") as failure:
        shared("w0", max_staleness=1)
    assert failure.value.field == "max_staleness"
