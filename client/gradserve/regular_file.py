"""Files that people write for programs: read only if they are regular and of a sensible size."""

import errno
import os
import stat

_FLAGS = ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
"""No system has all of them."""


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Returns the contents of a regular file, or of the one that a symbolic link leads to.

    It never waits: of a named pipe or a terminal nothing is read. Nor does a file that grows meanwhile take more memory
    than it may.

    Raises:
        OSError: It cannot be read, is not a regular file, or has more bytes; `strerror` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in _FLAGS))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, found another kind", os.fspath(path))
        with open(descriptor, "rb", closefd=False) as file:
            contents = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(contents) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes, found more", os.fspath(path))
    return contents
