"""What a worker that was started otherwise than the others is told."""

from typing import Any

import pytest

import gradserve
from tests.training.replicas import Replica

OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "another number of workers": ({"num_required": 4}, "agreement['num_required'] is '3', not '4'"),
    "another number of averages": ({"keep_averages": 9}, "keep_averages is 4, not 9"),
    "another order of summation": ({"deterministic": True}, "deterministic is False, not True"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_all_workers_must_be_started_alike(client: gradserve.Client, name: str, case: str) -> None:
    options, difference = OTHERWISE[case]
    Replica(client, name, "first", num_required=3)
    with pytest.raises(gradserve.AlreadyExistsError) as raised:
        Replica(client, name, "second", **{"num_required": 3, **options})
    assert raised.value.message == f"accumulator 'default/{name}' exists with another spec: {difference}"
    (note,) = raised.value.__notes__
    assert "the same parameters and the same num_required" in note
    Replica(client, name, "third", num_required=3)


@pytest.mark.parametrize(
    ("num_required", "message"),
    [
        (0, "expected a positive number of gradients for num_required, got 0"),
        (-1, "expected a positive number of gradients for num_required, got -1"),
        (1.5, "expected an integer for num_required, got 1.5"),
        ("3", "expected an integer for num_required, got '3'"),
    ],
)
def test_num_required_that_cannot_be(client: gradserve.Client, name: str, num_required: Any, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        Replica(client, name, "first", num_required)
    assert (raised.value.message, raised.value.field) == (message, "num_required")
    assert name not in {each.name for each in client.list_accumulators()}


def test_settings_that_differ(client: gradserve.Client, name: str) -> None:
    alike = {"data": "v1", "rate": "0.1"}
    with (
        Replica(client, name, "first", 1, settings={"numpy": alike}).begin() as first,
        Replica(client, name, "second", 1, settings={"numpy": {"data": "v1"}, "other": {"rate": "0.2"}}).begin(),
    ):
        for _ in range(2):
            other = Replica(client, name, "third", 1, settings={"numpy": {**alike, "rate": "0.2"}})
            with pytest.raises(
                gradserve.AlreadyExistsError, match=r"'third' has .*: rate is 0\.1 there and 0\.2 here\."
            ):
                other.begin()
            first.train()


def test_settings_that_are_no_texts(client: gradserve.Client, name: str) -> None:
    with pytest.raises(
        gradserve.InvalidArgumentError, match=r"texts by name for settings\['numpy'\], got 0\.1 for 'rate'"
    ):
        Replica(client, name, "first", 1, settings={"numpy": {"rate": 0.1}})
