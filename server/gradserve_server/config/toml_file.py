"""Files in TOML format that people write for a server."""

import re
import tomllib
from pathlib import Path
from typing import Any

from gradserve_protocol.tls import read_regular

MOST_BYTES = 1 << 20
_MOST_DOTS = 64
_STRING_OR_COMMENT = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|#.*""")


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the contents of a file, whatever it is, within a time that its size bounds.

    Raises:
        OSError: It cannot be read, is not a regular file, or has more than 1 MiB.
        ValueError: It is not valid; the message says where.
    """
    text = read_regular(path, MOST_BYTES).decode()
    for number, line in enumerate(text.split("\n"), 1):
        # The time that a key takes grows with the square of its parts.
        if line.count(".") > _MOST_DOTS and _STRING_OR_COMMENT.sub("", line).count(".") > _MOST_DOTS:
            raise ValueError(f"expected a key of at most {_MOST_DOTS} parts (at line {number})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("tables or lists are nested too deeply") from None
