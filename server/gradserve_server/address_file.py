"""The file in which a server publishes its addresses."""

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gradserve_server.own_file import OwnFile
from gradserve_server.system_errors import reason_of


def write_addresses(path: Path, addresses: Iterable[object]) -> OwnFile:
    """Writes addresses, one per line, in one step, so that nobody reads half of the file.

    Raises:
        OSError: The file cannot be written, or something other than an ordinary file is there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _check_replaceable(path)
        beside.write_text("".join(f"{address}\n" for address in addresses))
        return OwnFile.moved(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise OSError(f"cannot write the address file {path}: {reason_of(error)}") from None


def _check_replaceable(path: Path) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "something other than an ordinary file is there")
