"""One run at a time writes a file: a lock on the file itself, which ends with the processes that hold it."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 0.5


@contextlib.contextmanager
def hold(path: Path, wait: Callable[[float], None]) -> Iterator[int]:
    """Hold `path`, made empty when missing, against every other holder on this machine and on shared file systems.

    The holder may write the file in place, rename it or remove it; whoever waits looks at the path anew.

    Args:
        path: the file; its folder is made when missing.
        wait: called about twice a second, with the seconds waited, while another process or thread holds it; what it
            raises ends the waiting.

    Yields:
        The descriptor of the lock: a child process that inherits it holds the file too, until it ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    while (descriptor := _try_lock(path)) is None:
        wait(time.monotonic() - started)
        time.sleep(POLL_S)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # held; or the holder before us renamed it in this moment
        pass
    os.close(descriptor)
    return None
