"""Files in TOML format that people write for a server."""

import errno
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
_MOST_DOTS = 64
_STRING_OR_COMMENT = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|#.*""")


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the contents of a file, whatever it is, within a time that its size bounds.

    Raises:
        OSError: It cannot be read, is not a regular file, or has more than 1 MiB.
        ValueError: It is not valid; the message says where.
    """
    text = _read_regular(path).decode()
    for number, line in enumerate(text.split("\n"), 1):
        # The time that a key takes grows with the square of its parts.
        if line.count(".") > _MOST_DOTS and _STRING_OR_COMMENT.sub("", line).count(".") > _MOST_DOTS:
            raise ValueError(f"expected a key of at most {_MOST_DOTS} parts (at line {number})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("tables or lists are nested too deeply") from None


def _read_regular(path: Path) -> bytes:
    """See `gradserve.tls`, which is imported with gRPC: settings are read before, as they may silence that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, found another kind", os.fspath(path))
        with open(descriptor, "rb", closefd=False) as file:
            contents = file.read(MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(contents) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"expected at most {MOST_BYTES} bytes, found more", os.fspath(path))
    return contents
