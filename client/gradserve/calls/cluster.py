"""The servers of a client: which of them has an accumulator, and whether they are a cluster."""

from collections.abc import Sequence

from gradserve.calls.exchange import Operation, Unary
from gradserve.errors import InvalidArgumentError
from gradserve.v1 import server_messages_pb2 as messages_pb2
from gradserve.wire.placement import home_of

_FIELD = "address"


class Cluster:
    """The servers in the order of the client's list. A single one need not be in a cluster.

    Safe to use from several threads: servers may be asked twice.
    """

    def __init__(self, addresses: Sequence[str] = ("",)) -> None:
        """Takes the servers' addresses, as messages name them."""
        self._addresses = addresses
        self._members: dict[int, messages_pb2.ClusterMember] = {}

    @property
    def size(self) -> int:
        """The number of servers."""
        return len(self._addresses)

    def home_of(self, container: str, name: str) -> int:
        """Returns the index of the server that has an accumulator."""
        return 0 if self.size == 1 else home_of(container, name, self.size)

    def member(self, target: int) -> Operation[str]:
        """Returns the text by which requests name a server, after it was asked once; empty for a single server.

        Raises:
            InvalidArgumentError: It is not the server that the client's list says, or in another cluster.
        """
        if self.size == 1:
            return ""
        if target not in self._members:
            request = messages_pb2.GetServerInfoRequest()
            call = Unary("ServerService", "GetServerInfo", request, target=target)
            reply: messages_pb2.GetServerInfoResponse = yield call
            self._check(target, reply)
            self._members[target] = reply.member
        return member_text(self._members[target])

    def _check(self, target: int, reply: messages_pb2.GetServerInfoResponse) -> None:
        found, where = reply.member, f"the server at {self._addresses[target]}"
        if not reply.HasField("member"):
            raise InvalidArgumentError(
                f"{where} is in no cluster, and the client has a list of {self.size} servers: start it with "
                f"--cluster NAME --cluster-index {target} --cluster-size {self.size}",
                field=_FIELD,
            )
        if (found.index, found.size) != (target, self.size):
            raise InvalidArgumentError(
                f"{where} is server {found.index} of {found.size} in cluster {found.cluster!r}, and {target} of "
                f"{self.size} in the client's list: give all servers of the cluster in their order",
                field=_FIELD,
            )
        for other, member in list(self._members.items()):
            if member.cluster != found.cluster:
                raise InvalidArgumentError(
                    f"{where} is in cluster {found.cluster!r}, and {self._addresses[other]} in cluster "
                    f"{member.cluster!r}",
                    field=_FIELD,
                )


def member_text(member: messages_pb2.ClusterMember) -> str:
    """Returns the text by which requests name a member of a cluster."""
    return f"{member.cluster} {member.index}/{member.size}"
