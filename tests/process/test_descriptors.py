import logging
import resource
from typing import Any

import pytest

from gradserve_server import parts as descriptors
from gradserve_server.config import LimitsConfig
from gradserve_server.parts import RESERVED, within_descriptors
from gradserve_server.rpc.listeners.sockets.payloads import max_regions


@pytest.fixture
def few_descriptors(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2048, 2048))
    return 2048


@pytest.mark.parametrize("num_addresses", [1, 2, 5])
def test_clients_cannot_take_all_descriptors(few_descriptors: int, num_addresses: int) -> None:
    limits = within_descriptors(LimitsConfig(max_connections=10_000), num_addresses)
    # Connections to each address of gRPC and to sockets, strands, and regions.
    taken = limits.max_connections * (num_addresses + 2) + max_regions()
    assert few_descriptors - RESERVED - (num_addresses + 2) < taken <= few_descriptors - RESERVED


def test_limits_for_which_there_are_enough_stay(few_descriptors: int) -> None:
    limits = LimitsConfig(max_connections=100)
    assert within_descriptors(limits, 1) is limits


def test_without_a_limit_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    limits = LimitsConfig(max_connections=1_000_000)
    assert within_descriptors(limits, 1) is limits


@pytest.mark.parametrize(("given", "level"), [({"max_connections": 5000}, logging.WARNING), ({}, logging.DEBUG)])
def test_what_was_asked_for_and_cannot_be_had_is_a_warning(
    few_descriptors: int, caplog: pytest.LogCaptureFixture, given: Any, level: int
) -> None:
    with caplog.at_level(logging.DEBUG, descriptors.__name__):
        within_descriptors(LimitsConfig(**given), 1)
    (record,) = caplog.records
    assert record.levelno == level
    assert f"this process may open {few_descriptors} files" in record.getMessage()
