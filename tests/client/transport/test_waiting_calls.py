"""Calls that wait for other clients share connections only up to a limit; other calls are never behind them."""

from contextlib import ExitStack

import grpc

from gradserve.transport.channel import MAX_WAITING_CALLS, CallCredentials, Channel
from gradserve.transport.settings import ConnectionSettings
from gradserve_protocol.address import Address


def new_channel() -> Channel:
    address, settings = Address.to_connect("localhost:1"), ConnectionSettings()
    return Channel(address, settings, CallCredentials.to(address, settings), grpc)


def test_more_waiting_calls_take_further_connections() -> None:
    channel = new_channel()
    with ExitStack() as waiting:
        taken = [waiting.enter_context(channel.waiting()) for _ in range(2 * MAX_WAITING_CALLS + 1)]
        assert len(channel.opened) == 3
        assert {taken.count(each) for each in channel.opened} == {MAX_WAITING_CALLS, 1}
        assert channel.now is channel.opened[0]
    for each in channel.opened:
        each.close()


def test_the_room_of_calls_that_have_ended_is_used_again() -> None:
    channel = new_channel()
    for _ in range(3):
        with ExitStack() as waiting:
            for _ in range(MAX_WAITING_CALLS):
                waiting.enter_context(channel.waiting())
    assert len(channel.opened) == 1
    channel.now.close()
