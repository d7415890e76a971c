"""Finds the symbols that an ELF object file needs from elsewhere."""

import struct
from collections.abc import Iterator

_MAGIC_64_BIT_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_SYMTAB = 2
_UNDEFINED = 0


def undefined_symbols(content: bytes) -> set[str]:
    """Returns the names of the symbols that an object file uses and does not define.

    Raises:
        ValueError: It is not a little-endian ELF file of 64 bits.
    """
    if not content.startswith(_MAGIC_64_BIT_LITTLE_ENDIAN):
        raise ValueError("expected a little-endian ELF file of 64 bits")
    sections = list(_sections(content))
    names = set()
    for kind, offset, size, link, entry_size in sections:
        if kind == _SYMTAB:
            strings = sections[link][1]
            for position in range(offset, offset + size, entry_size):
                name, _, _, section = struct.unpack_from("<IBBH", content, position)
                if section == _UNDEFINED and name:
                    start = strings + name
                    names.add(content[start : content.index(b"\0", start)].decode())
    return names


def _sections(content: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields the kind, offset, size, link and entry size of each section."""
    (table,) = struct.unpack_from("<Q", content, 0x28)
    header_size, count = struct.unpack_from("<HH", content, 0x3A)
    for position in range(table, table + count * header_size, header_size):
        kind, offset, size, link, entry_size = struct.unpack_from("<4xI16xQQI12xQ", content, position)
        yield kind, offset, size, link, entry_size
