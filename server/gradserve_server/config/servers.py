"""The other servers that a server has to do with."""

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo

from gradserve_server.config.fields import NUMBER, Concern, Expected, Seconds

_MAX_SERVERS = 10_000
_MAX_SUMMANDS = 1024
"""As `limits.MAX_SUMMANDS`."""


def _with_name(size: int, given: ValidationInfo) -> int:
    if size > 1 and given.data.get("cluster") is None:
        raise ValueError(f"expected the name of the cluster, --cluster, with {size} servers")
    return size


def _below_size(index: int, given: ValidationInfo) -> int:
    size = given.data.get("cluster_size", index + 1)
    if index >= size:
        raise ValueError(f"expected a number below cluster_size, {size}, got {index}")
    return index


class ClusterConfig(Concern):
    """The place of the server among several that share out accumulators."""

    cluster: Annotated[
        str | None,
        Field(
            pattern=r"^[A-Za-z0-9._-]{1,63}$",
            description="name of the cluster that the server is in; see docs/many_servers.md (default: none)",
        ),
        Expected("1 to 63 letters, digits, or ._-"),
    ] = None
    cluster_size: Annotated[
        int,
        NUMBER,
        Field(gt=0, le=_MAX_SERVERS, description="number of servers in the cluster"),
        AfterValidator(_with_name),
        Expected(f"a whole number from 1 to {_MAX_SERVERS}"),
    ] = 1
    cluster_index: Annotated[
        int,
        NUMBER,
        Field(ge=0, lt=_MAX_SERVERS, description="number of the server in the cluster, from 0"),
        AfterValidator(_below_size),
        Expected(f"a whole number from 0 to {_MAX_SERVERS - 1}"),
    ] = 0


def _connectable(text: str) -> str:
    from gradserve_protocol.address import addresses_to_connect

    if "://" not in text:  # others are looked up when the server starts
        addresses_to_connect(text)
    return text


def _with_upstream(value: object, given: ValidationInfo) -> object:
    if value is not None and given.data.get("upstream") is None:
        raise ValueError("expected upstream as well: the address that gradients are forwarded to")
    return value


def _with_workers(value: int | None, given: ValidationInfo) -> int | None:
    if value is None and given.data.get("upstream") is not None:
        raise ValueError("expected upstream_workers as well: the number of gradients that are forwarded as one")
    return value


class UpstreamConfig(Concern):
    """The server that an aggregator forwards gradients to."""

    upstream: Annotated[
        str | None,
        AfterValidator(_connectable),
        Field(
            min_length=1,
            description="address of a server, or comma-separated addresses of a cluster: this server is an aggregator, "
            "which forwards the gradients and updates of several workers to it as one (default: none)",
        ),
        Expected("an address such as top:50051"),
    ] = None
    upstream_workers: Annotated[
        Annotated[int, NUMBER, Field(gt=0, le=_MAX_SUMMANDS)] | None,
        Field(
            validate_default=True,
            description="with --upstream: the number of gradients that are forwarded as one, which is the number of "
            "workers here",
        ),
        AfterValidator(_with_upstream),
        AfterValidator(_with_workers),
        Expected(f"a whole number from 1 to {_MAX_SUMMANDS}"),
    ] = None
    upstream_grace_seconds: Annotated[
        Seconds,
        Field(
            description="with --upstream: how long a gradient waits for those of other workers here before it is "
            "forwarded without them"
        ),
    ] = 1.0
    upstream_users_file: Annotated[
        str | None,
        Field(
            min_length=1,
            description="with --upstream: file on which everybody who uses the aggregator holds a shared lock (flock): "
            "the server ends when nobody has held one for upstream_idle_seconds (default: it does not end by itself)",
        ),
        AfterValidator(_with_upstream),
        Expected("the path of a file"),
    ] = None
    upstream_idle_seconds: Annotated[
        Seconds, Field(description="with --upstream-users-file: how long the server goes on without users")
    ] = 60.0
