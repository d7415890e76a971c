"""What is seen of a server of a cluster. Does not import Ray."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SeenMember:
    """A server as its cluster sees it.

    Attributes:
        index: Its number.
        address: Where it serves, or last served; empty if it never has.
        node: The IP address of its node.
        pid: The number of its process on the node; 0 if it has none.
        state: "starting", "running", "restarting", "stopped"; "silent" if nothing was heard of its actor for a while.
        restarts: How often it was started again.
        problem: How it ended, and its last words, if it has ended by itself and is not back.
    """

    index: int
    address: str
    node: str
    pid: int
    state: str
    restarts: int
    problem: str
