"""The place of a server in a cluster: which accumulators and parameters belong to it."""

from dataclasses import dataclass

from gradserve_protocol.placement import home_of
from gradserve_server.config.servers import ClusterConfig
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.resources.registry import ResourceKey


class MisplacedError(InvalidArgumentError):
    """An accumulator or parameters do not belong to this server of the cluster, or not to a cluster of this size."""


@dataclass(frozen=True)
class Member:
    """One server of a cluster.

    Attributes:
        cluster: The name of the cluster.
        index: The number of the server, from 0.
        size: The number of servers.
    """

    cluster: str
    index: int
    size: int

    def __str__(self) -> str:
        return f"server {self.index} of {self.size} in cluster {self.cluster!r}"

    @property
    def text(self) -> str:
        """The member as requests name it: "CLUSTER INDEX/SIZE"."""
        return f"{self.cluster} {self.index}/{self.size}"

    def is_home(self, key: ResourceKey) -> bool:
        """Returns True if an accumulator or parameters of this name belong here."""
        return home_of(key.container, key.name, self.size) == self.index

    def check_home(self, key: ResourceKey, field: str = "accumulator") -> None:
        """Checks that an accumulator or parameters of this name belong here.

        Args:
            key: The name.
            field: The field of requests that has it.

        Raises:
            MisplacedError: It belongs to another server of the cluster.
        """
        home = home_of(key.container, key.name, self.size)
        if home != self.index:
            belongs = "belong" if field == "parameters" else "belongs"
            raise MisplacedError(
                f"{field} {str(key)!r} {belongs} to server {home} of cluster {self.cluster!r}, and this is server "
                f"{self.index} of {self.size}: connect to all of them, in their order",
                field=f"{field}.name",
                code="GS_WRONG_SERVER",
            )


def check_place(member: Member | None, key: ResourceKey, num_shards: int, field: str = "accumulator") -> None:
    """Checks that an accumulator or parameters belong here.

    Args:
        member: The server's place; None if it is in no cluster.
        key: The name of the accumulator.
        num_shards: The number of servers over which it is sharded; 0 if it is on one.
        field: The field of requests that has the name.

    Raises:
        MisplacedError: It belongs to another server, or is sharded over another number of servers.
    """
    if num_shards:
        size = 0 if member is None else member.size
        if size != num_shards:
            what = "in no cluster" if member is None else str(member)
            raise MisplacedError(
                f"{field} {str(key)!r} {_be(field)} sharded over {num_shards} servers, and this server is {what}",
                field="spec.num_shards",
                code="GS_WRONG_SERVER",
            )
    elif member is not None:
        member.check_home(key, field)


def _be(field: str) -> str:
    return "are" if field == "parameters" else "is"


def member_of(config: ClusterConfig) -> Member | None:
    """Returns the place that a configuration gives a server; None if it is in no cluster."""
    return None if config.cluster is None else Member(config.cluster, config.cluster_index, config.cluster_size)


def check_member(member: Member | None, wanted: str, field: str = "accumulator") -> None:
    """Checks that a call is for this server, if it is for a certain member of a cluster.

    Args:
        member: The server's place; None if it is in no cluster.
        wanted: The member that the call is for, as `Member.text`; empty for any.
        field: The field of the request that says so.

    Raises:
        InvalidArgumentError: It is for another one.
    """
    if wanted and (member is None or wanted != member.text):
        what = "in no cluster" if member is None else str(member)
        raise InvalidArgumentError(f"this server is {what}, and the call is for {wanted!r}", field=f"{field}.member")
