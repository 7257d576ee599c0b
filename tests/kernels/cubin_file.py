"""Reads a cubin, an ELF file, as far as the compile tests need it."""

import struct

_MAX_THREADS = 0x05
"""Number of the attribute that `__launch_bounds__` leaves."""
_SIZED = 0x04
"""Format of attributes whose values follow a length."""


def sections(content):
    """Return the bytes of each section by name."""
    (table,) = struct.unpack_from("<Q", content, 0x28)
    entry, number, names = struct.unpack_from("<HHH", content, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", content, table + i * entry) for i in range(number)]
    strings = heads[names][4]

    def text(start):
        return content[start : content.index(b"\0", start)].decode()

    return {text(strings + head[0]): content[head[4] : head[4] + head[5]] for head in heads}


def max_threads(content, kernel):
    """Return the threads of a block that `__launch_bounds__` promises, None where a kernel has none."""
    info, at = sections(content)[f".nv.info.{kernel}"], 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if attribute == _MAX_THREADS:
                x, y, z = struct.unpack_from("<III", info, at)
                return x * y * z
            at += size
    return None
