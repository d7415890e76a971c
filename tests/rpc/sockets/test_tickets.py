"""Tickets open one connection, once, in time, for their client."""

from itertools import count

import pytest

from gradserve_server.errors import NotFoundError, ResourceExhaustedError
from gradserve_server.rpc.sockets.service import LIFETIME_SECONDS, TICKET_BYTES, Grant, TicketRegistry


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def grant(client_id: str = "a") -> Grant:
    return Grant(client_id, to_server=True, to_client=False, max_payload_bytes=5)


def test_a_ticket_opens_once() -> None:
    office = TicketRegistry(Clock())
    ticket = office.issue(grant())
    assert len(ticket) == TICKET_BYTES
    assert office.redeem(ticket, "a") == grant()
    with pytest.raises(NotFoundError, match="it was used, has expired") as error:
        office.redeem(ticket, "a")
    assert error.value.field == "ticket"


def test_a_ticket_expires() -> None:
    clock = Clock()
    office = TicketRegistry(clock)
    first = office.issue(grant())
    clock.now += LIFETIME_SECONDS - 0.5
    second = office.issue(grant())
    clock.now += 0.5
    with pytest.raises(NotFoundError):
        office.redeem(first, "a")
    assert office.redeem(second, "a") == grant()


@pytest.mark.parametrize("client_id", ["b", "", "A", "a\0", "ä"])
def test_another_client_cannot_use_it_and_it_is_spent(client_id: str) -> None:
    office = TicketRegistry(Clock())
    ticket = office.issue(grant())
    for name in (client_id, "a"):
        with pytest.raises(NotFoundError):
            office.redeem(ticket, name)


@pytest.mark.parametrize("ticket", [b"", b"x", bytes(TICKET_BYTES), bytes(1000)])
def test_a_made_up_ticket(ticket: bytes) -> None:
    office = TicketRegistry(Clock())
    good = office.issue(grant())
    with pytest.raises(NotFoundError):
        office.redeem(ticket, "a")
    assert office.redeem(good, "a") == grant()


def test_too_many_wait_until_some_are_used_or_expire() -> None:
    clock, numbers = Clock(), count()
    office = TicketRegistry(clock, lambda size: next(numbers).to_bytes(size, "big"))
    tickets = [office.issue(grant()) for _ in range(4096)]
    with pytest.raises(ResourceExhaustedError, match="4096 wait to be used, 4096 allowed"):
        office.issue(grant())
    office.redeem(tickets[7], "a")
    office.issue(grant())
    with pytest.raises(ResourceExhaustedError):
        office.issue(grant())
    clock.now += LIFETIME_SECONDS
    assert office.issue(grant())
