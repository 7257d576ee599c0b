"""Finds out that another rank died, which no collective in a CUDA graph would ever say, and ends this one too."""

import atexit
import os
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

_LEFT = -(1 << 40)  # far below zero whatever was counted before: the rank took its leave


class RankWatch(threading.Thread):
    """Counts for the others to see, and looks whether they still count.

    A rank that was killed or ended by an error stops counting. The thread then prints which one it was and ends this
    process: its main thread may wait for ever in a collective that the dead rank will not join. Only a rank that took
    its leave (`leave`) is no longer waited for: a process at its end cannot tell `sys.exit(1)` from a good one.

    Attributes:
        patience_s: seconds without a count after which a rank is lost.
        generation: watches of this process so far, of the class: a launcher's store outlives a group and its keys.
    """

    generation = 0
    _of_process: "RankWatch | None" = None

    def __init__(self, store: dist.Store, rank: int, size: int, patience_s: float) -> None:
        """Start to count and to look.

        Args:
            store: of all ranks.
            rank: this one.
            size: ranks in all.
            patience_s: see above.
        """
        super().__init__(name="kdlab-rank-watch", daemon=True)
        self.patience_s = patience_s
        self._store, self._rank = store, rank
        self._looked = time.monotonic()
        self._seen = {other: (0, self._looked) for other in range(size) if other != rank}
        self._ended = threading.Event()
        self.start()

    @classmethod
    def of_process(cls, rank: int, size: int, patience_s: float) -> "RankWatch | None":
        """Return the watch of this process over the default group, started at the first call; None for one rank."""
        if size == 1:
            return None
        watch = cls._of_process
        if watch is None or watch._ended.is_set():
            # A client of its own: a store's calls wait for one another.
            default: Any = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"kdlab-alive-{cls.generation}", default.clone())
            watch = cls._of_process = cls(store, rank, size, patience_s)
            cls.generation += 1
            atexit.register(watch._fall_silent)  # a thread inside the store when the interpreter ends would abort it
        watch.patience_s = patience_s
        return watch

    def run(self) -> None:
        """Count and look until a rank is lost or this one leaves."""
        while not self._ended.wait(self._period_s):
            try:
                self._store.add(str(self._rank), 1)
                lost = self._look()
            except RuntimeError:
                self._end("rank 0 or the launcher of the ranks is gone: their common store does not answer")
                return  # this rank was about to leave
            if lost is not None:
                how = "killed, ended by an error, or gone without `Ranks.close()`"
                self._end(f"rank {lost} gave no sign of life for {self.patience_s:g} s: {how}")

    def leave(self) -> None:
        """Stop watching, and let the others do without this rank; rank 0 goes last, as it may hold the store."""
        if self._ended.is_set():
            return
        self._fall_silent()
        try:
            self._store.add(str(self._rank), _LEFT)
            until = time.monotonic() + self.patience_s
            while self._rank == 0 and self._seen and time.monotonic() < until:
                self._look()
                time.sleep(0.01)
        except RuntimeError:  # the store went first
            return

    def wait_for_the_end(self) -> None:
        """Wait until this thread ended the process; return if it found nobody to be lost."""
        self.join(2 * self.patience_s)

    @property
    def _period_s(self) -> float:
        return min(self.patience_s / 8, 1.0)

    def _look(self) -> int | None:
        """Return a rank that has stopped counting, if there is one."""
        now = time.monotonic()
        if now - self._looked > self.patience_s / 2:  # this process was stopped, and perhaps all of them were
            self._seen = {other: (count, now) for other, (count, _) in self._seen.items()}
        self._looked = now
        for other, (count, since) in list(self._seen.items()):
            counted = self._store.add(str(other), 0)
            if counted < 0:
                del self._seen[other]
            elif counted != count:
                self._seen[other] = counted, now
            elif now - since > self.patience_s:
                return other
        return None

    def _end(self, reason: str) -> None:
        if self._ended.is_set():
            return
        sys.stdout.flush()
        print(f"kdlab: {reason}; rank {self._rank} ends too", file=sys.stderr, flush=True)
        if self._rank == 0:  # it may hold the store, in which the others are about to see the same
            time.sleep(2 * self._period_s)
        os._exit(1)

    def _fall_silent(self) -> None:
        self._ended.set()
        self.join(self.patience_s)
