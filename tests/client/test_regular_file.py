"""Files that are read only if they are regular and of a sensible size."""

import os
from pathlib import Path

import pytest

from gradserve_protocol.tls import read_regular
from tests.servers.descriptors import num_open


def test_a_file_is_read_also_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 5) == b"12345"


def test_a_longer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123456")
    with pytest.raises(OSError, match="expected at most 5 bytes, found more"):
        read_regular(tmp_path / "file", 5)


def test_nothing_else_is_waited_for_and_no_descriptor_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        before = num_open(path)
        with pytest.raises(OSError, match="expected a regular file, found another kind"):
            read_regular(path, 100)
        assert num_open(path) == before
