"""A name server on loopback, over UDP and TCP, with records that a test gives it."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import dns.flags
import dns.message
import dns.rcode
import dns.resolver
import dns.rrset

_LONGEST = 65535
_LONGEST_OVER_UDP = 512


@dataclass
class NameServer:
    """Answers from a table, in threads.

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
    with ExitStack() as stack:
        over_tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = over_tcp.getsockname()[1]
        over_udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        over_udp.bind(("127.0.0.1", port))
        server = NameServer(records, port)
        for serve, listening in ((_serve_udp, over_udp), (_serve_tcp, over_tcp)):
            thread = threading.Thread(target=serve, args=(server, listening), name=f"name-{serve.__name__}")
            thread.start()
            stack.callback(thread.join)
            stack.callback(_wake, listening)
        yield server


def _wake(listening: socket.socket) -> None:
    """Ends what waits for the socket."""
    with contextlib.suppress(OSError):  # a socket for UDP is not connected, but is woken all the same
        listening.shutdown(socket.SHUT_RDWR)


def _serve_udp(server: NameServer, listening: socket.socket) -> None:
    while received := listening.recvfrom(_LONGEST):
        question, sender = received
        if not question:
            return
        if (reply := server.answer(question)) is not None:
            if len(reply) > _LONGEST_OVER_UDP:
                truncated = dns.message.make_response(dns.message.from_wire(question))
                truncated.flags |= dns.flags.TC
                reply = truncated.to_wire()
            listening.sendto(reply, sender)


def _serve_tcp(server: NameServer, listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # woken
            return
        with connection, connection.makefile("rwb") as stream:
            question = stream.read(int.from_bytes(stream.read(2), "big"))
            if (reply := server.answer(question)) is not None:
                stream.write(len(reply).to_bytes(2, "big") + reply)
