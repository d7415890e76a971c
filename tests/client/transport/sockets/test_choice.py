"""The choice of the way: what is tried when, what is said about it, and what users can ask for."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

import gradserve
from gradserve.results import TransportInfo
from gradserve.transport.settings import ConnectionSettings, SocketSettings, Transport, Way
from gradserve.transport.sockets.choice import Choice

AUTO = ConnectionSettings()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("argument", "variable", "wanted"),
    [
        (None, None, "auto"),
        (None, "", "auto"),
        (None, "bulk", "bulk"),
        (None, "GRPC", "grpc"),
        ("shared_memory", "bulk", "shared_memory"),
        ("auto", "grpc", "auto"),
        ("grpc", "nonsense", "grpc"),
    ],
)
def test_an_argument_beats_the_environment(argument: str | None, variable: str | None, wanted: str) -> None:
    environment = {} if variable is None else {"GRADSERVE_TRANSPORT": variable}
    assert Transport.wanted(argument, environment) == wanted


@pytest.mark.parametrize(("text", "strands"), [(None, 3), ("", 3), ("1", 0), ("2", 1), ("16", 15)])
def test_the_number_of_sockets(text: str | None, strands: int) -> None:
    environment = {} if text is None else {"GRADSERVE_BULK_SOCKETS": text}
    assert SocketSettings.wanted(environment).strands == strands


@pytest.mark.parametrize(("text", "shares"), [(None, True), ("", True), ("auto", True), ("COPY", False)])
def test_whether_memory_of_a_gpu_is_shared(text: str | None, shares: bool) -> None:
    environment = {} if text is None else {"GRADSERVE_GPU_ARRAYS": text}
    assert SocketSettings.wanted(environment).shares_gpu is shares


def test_another_word_for_arrays_of_a_gpu() -> None:
    with pytest.raises(
        gradserve.InvalidArgumentError, match="expected 'auto' or 'copy' for GRADSERVE_GPU_ARRAYS, got 'x'"
    ):
        SocketSettings.wanted({"GRADSERVE_GPU_ARRAYS": "x"})


@pytest.mark.parametrize("text", ["0", "17", "-1", "two", "1.5", " 3", "\N{SUPERSCRIPT TWO}"])
def test_other_numbers_of_sockets(text: str) -> None:
    expected = "expected a number from 1 to 16 for GRADSERVE_BULK_SOCKETS, got "
    with pytest.raises(gradserve.InvalidArgumentError, match=expected):
        SocketSettings.wanted({"GRADSERVE_BULK_SOCKETS": text})


@pytest.mark.parametrize(
    ("argument", "variable", "name"),
    [("tcp", "", "transport"), (5, "", "transport"), (None, "fast", "GRADSERVE_TRANSPORT")],
)
def test_other_words(argument: object, variable: str, name: str) -> None:
    expected = f"expected 'auto' or 'shared_memory' or 'bulk' or 'grpc' for {name}, got "
    with pytest.raises(gradserve.InvalidArgumentError, match=expected) as error:
        Transport.wanted(argument, {"GRADSERVE_TRANSPORT": variable})
    assert error.value.field == name


@pytest.mark.parametrize(
    ("transport", "ways"),
    [
        (Transport.AUTO, (Way.SHARED_MEMORY, Way.BULK)),
        (Transport.SHARED_MEMORY, (Way.SHARED_MEMORY,)),
        (Transport.BULK, (Way.BULK,)),
        (Transport.GRPC, ()),
    ],
)
def test_what_is_tried(transport: Transport, ways: tuple[Way, ...]) -> None:
    choice = Choice(replace(AUTO, transport=transport), "host:1")
    assert tuple(choice.ways) == ways
    assert choice.may_open() == bool(ways)


def test_pauses_grow_until_a_call_is_answered() -> None:
    clock = Clock()
    choice = Choice(AUTO, "host:1", clock)
    pauses = []
    for _ in range(6):
        assert choice.may_open()
        choice.failed("refused")
        began = clock.now
        while not choice.may_open():
            clock.now += 1
        pauses.append(clock.now - began)
        assert not choice.may_open()  # one call tries; the others do not wait for it
        clock.now += 1000
    assert pauses == [30, 60, 120, 240, 300, 300]
    choice.opened(Way.BULK, [])
    choice.worked()
    choice.broke("reset")
    clock.now += 29
    assert not choice.may_open()
    clock.now += 1
    assert choice.may_open()


def test_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    choice = Choice(AUTO, "host:1", clock)
    steps: list[Callable[[], None]] = [
        lambda: choice.opened(Way.BULK, ["shared_memory: the server has no socket for it"]),
        lambda: choice.opened(Way.BULK, ["shared_memory: the server has no socket for it"]),
        lambda: choice.broke("reset by peer"),
        lambda: choice.failed("refused"),
        lambda: choice.opened(Way.SHARED_MEMORY, []),
    ]
    said = []
    with caplog.at_level(logging.DEBUG, "gradserve"):
        for step in steps:
            caplog.clear()
            step()
            said.append([(record.levelname, record.getMessage()) for record in caplog.records])
    assert said == [
        [("DEBUG", "calls to host:1 go by way of bulk (shared_memory: the server has no socket for it)")],
        [],
        [("WARNING", "calls to host:1 go over gRPC for 30 s: reset by peer")],
        [("DEBUG", "calls to host:1 still go over gRPC: refused")],
        [("DEBUG", "calls to host:1 go by way of shared_memory")],
    ]


def test_a_server_without_sockets_is_worth_one_line(caplog: pytest.LogCaptureFixture) -> None:
    choice = Choice(AUTO, "host:1")
    with caplog.at_level(logging.INFO, "gradserve"):
        choice.failed("the server issues no tickets")
        choice.failed("the server issues no tickets")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "calls to host:1 go over gRPC: the server issues no tickets")
    ]
    assert choice.info == TransportInfo("grpc", "the server issues no tickets")


def test_a_demanded_way_that_is_not_possible() -> None:
    choice = Choice(replace(AUTO, transport=Transport.BULK), "host:1")
    for _ in range(2):
        assert choice.may_open()
        with pytest.raises(gradserve.UnavailableError, match="transport='bulk' is not possible: refused"):
            choice.failed("refused")
    choice.broke("reset")
    assert choice.may_open()
