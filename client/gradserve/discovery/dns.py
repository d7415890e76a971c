"""The servers of a service in DNS: the targets of its SRV records."""

import re
from typing import TYPE_CHECKING

from gradserve_protocol.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from dns.rdtypes.IN.SRV import SRV
    from dns.resolver import Resolver

LOOKUP_SECONDS = 5.0
"""The time limit of a lookup, with all attempts and search domains."""

_FIELD = "address"
_SERVICE = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?", re.ASCII)
_PORT_LABELS = "_grpc._tcp"


def servers_of_service(service: str) -> list[str]:
    """Returns the addresses of the servers of a service, HOST:PORT, in the natural order of their hosts.

    Asks the name servers of the system, with its search domains, for SRV records. Blocks for up to 5 s.

    Args:
        service: The name of the service, whose records are those of `_grpc._tcp.SERVICE`, or with a leading underscore
            the name of the records themselves.

    Raises:
        InvalidArgumentError: The name is not valid, dnspython is not installed, or the records have several priorities.
        UnavailableError: There are no such records, or DNS does not answer.
    """
    return look_up(service)


def look_up(service: str, resolver: "Resolver | None" = None) -> list[str]:
    """Looks up the servers of a service like `servers_of_service`, with a given resolver; None for the system's."""
    name = _record_name(service)
    try:
        import dns.exception
        import dns.resolver
    except ModuleNotFoundError:
        raise InvalidArgumentError(
            "address: dns+srv:// needs dnspython; install it in a checkout of gradserve with: pip install '.[dns]'",
            field=_FIELD,
        ) from None
    try:
        asked = system_resolver() if resolver is None else resolver
        answer = asked.resolve(name, "SRV", search=True, lifetime=LOOKUP_SECONDS)
    except dns.resolver.NXDOMAIN as error:
        tried = ", ".join(each.to_text(omit_final_dot=True) for each in error.qnames())
        raise UnavailableError(
            f"dns+srv://{service}: there is no such name in DNS; asked for {tried}", code="GS_DNS"
        ) from None
    except dns.resolver.NoAnswer:
        raise UnavailableError(f"dns+srv://{service}: {name} has no SRV records in DNS", code="GS_DNS") from None
    except dns.exception.Timeout:
        raise UnavailableError(
            f"dns+srv://{service}: no name server has answered within {LOOKUP_SECONDS:g} s", code="GS_DNS"
        ) from None
    except dns.exception.DNSException as error:
        raise UnavailableError(f"dns+srv://{service}: the lookup in DNS has failed: {error}", code="GS_DNS") from None
    return _in_order(service, list(answer))


def system_resolver() -> "Resolver":
    """Returns a resolver with the name servers and the search domains of the system."""
    import dns.resolver

    return dns.resolver.Resolver()


def _record_name(service: str) -> str:
    if not _SERVICE.fullmatch(service):
        raise InvalidArgumentError(
            f"expected dns+srv://SERVICE with the name of a service in DNS, got {f'dns+srv://{service}'!r}; ports come "
            "from its SRV records",
            field=_FIELD,
        )
    return service if service.startswith("_") else f"{_PORT_LABELS}.{service}"


def _in_order(service: str, records: "list[SRV]") -> list[str]:
    priorities = sorted({record.priority for record in records})
    if len(priorities) > 1:
        # With several priorities, a client should use the lowest, and fall back to the others. But no server of a
        # cluster can replace another.
        raise InvalidArgumentError(
            f"dns+srv://{service}: the SRV records have the priorities {', '.join(map(str, priorities))}: servers of a "
            "cluster cannot replace each other, so all have to have the same priority",
            field=_FIELD,
        )
    # A set, because a host may have one record for each IP address, which differ only in their weights.
    servers = {(record.target.to_text(omit_final_dot=True).lower(), record.port) for record in records}
    if any(host in ("", ".") for host, _ in servers):
        raise UnavailableError(
            f"dns+srv://{service}: its SRV record says that no server has the service", code="GS_DNS"
        )
    return [f"{host}:{port}" for host, port in sorted(servers, key=lambda server: (_natural(server[0]), *server))]


def _natural(host: str) -> list[str | int]:
    """Returns a sort key that compares numbers in host names as numbers: gradserve-2 before gradserve-10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", host)]
