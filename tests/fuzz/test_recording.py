"""The recorded requests that are mutated are those of the present contract."""

from tests.fuzz.targets.recording import ALONE, SHARDED, record
from tests.servers.raw_calls import METHODS


def test_every_method_has_a_recorded_request() -> None:
    assert METHODS.keys() == {method for each in (ALONE, SHARDED) for method, _ in each.calls()}


def test_requests_can_be_recorded_again() -> None:
    assert all(record().values())
