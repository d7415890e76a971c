"""Which server of a cluster an accumulator is on."""

from hashlib import blake2b

DEFAULT_CONTAINER = "default"


def home_of(container: str, name: str, size: int) -> int:
    """Returns the index of the server that has the accumulator of a name, in a cluster of `size` servers.

    It is the server whose number hashes highest together with the name (rendezvous hashing): when a server joins, the
    names that it gets move, and no others. docs/many_servers.md specifies the hash for other languages.

    Args:
        container: The namespace; empty means "default".
        name: The name.
        size: The number of servers.
    """
    text = f"{container or DEFAULT_CONTAINER}\n{name}".encode()

    def weight(index: int) -> bytes:
        return blake2b(index.to_bytes(4, "little") + text, digest_size=8).digest()

    return max(range(size), key=weight)
