"""A name server on loopback, with records that a test gives it."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import dns.flags
import dns.message
import dns.rcode
import dns.resolver
import dns.rrset


@dataclass
class NameServer:
    """Answers over UDP from a table, in a thread.

    Attributes:
        records: SRV records, "PRIORITY WEIGHT PORT TARGET", by the absolute name. A name that is not there does not
            exist.
        port: Where it listens on 127.0.0.1.
        asked: The names it was asked for.
        silent: True to answer nothing.
        failing: True to answer every question with SERVFAIL.
    """

    records: Mapping[str, Sequence[str]]
    port: int
    asked: list[str] = field(default_factory=list)
    silent: bool = False
    failing: bool = False

    def resolver(self, *search: str, ndots: int = 5) -> dns.resolver.Resolver:
        """Returns a resolver that asks it, with search domains, as a pod has them."""
        resolver = dns.resolver.Resolver(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = self.port
        resolver.search = [dns.name.from_text(domain) for domain in search]
        resolver.ndots = ndots
        return resolver

    def answer(self, question: bytes) -> bytes | None:
        query = dns.message.from_wire(question)
        (asked,) = query.question
        self.asked.append(asked.name.to_text())
        if self.silent:
            return None
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.RA
        if self.failing:
            reply.set_rcode(dns.rcode.SERVFAIL)
        elif asked.name.to_text() not in self.records:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif records := self.records[asked.name.to_text()]:
            reply.answer.append(dns.rrset.from_text(asked.name, 5, "IN", "SRV", *records))
        return reply.to_wire()


@contextmanager
def name_server(records: Mapping[str, Sequence[str]]) -> Iterator[NameServer]:
    """Runs a name server until the end of the block."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        server = NameServer(records, listening.getsockname()[1])
        thread = threading.Thread(target=_serve, args=(server, listening), name="name-server")
        thread.start()
        try:
            yield server
        finally:
            with contextlib.suppress(OSError):  # the socket is not connected, but this wakes the thread all the same
                listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(server: NameServer, listening: socket.socket) -> None:
    while question := listening.recvfrom(65535):
        text, sender = question
        if not text:
            return
        if (reply := server.answer(text)) is not None:
            listening.sendto(reply, sender)
