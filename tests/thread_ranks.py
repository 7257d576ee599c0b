"""Ranks as threads of one process, so that one GPU can run every rank's slice with the real ops; eager rounds only."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kdlab.model.drafter import plan_drafter
from kdlab.model.pair import Pair
from kdlab.model.ranks import Ranks
from kdlab.model.target import plan_target
from kdlab.model.tokenizer import load_tokenizer
from kdlab.paths import bundled_pair


class Meeting:
    """Where the threads hand one another copies of their tensors."""

    def __init__(self, size):
        self.barrier, self.table = threading.Barrier(size), [None] * size

    def exchange(self, rank, x):
        self.table[rank] = x.clone()
        self.barrier.wait(60)
        found = list(self.table)
        self.barrier.wait(60)
        return found


@dataclass(frozen=True, eq=False)
class ThreadRanks(Ranks):
    meeting: Meeting | None = None

    def all_reduce(self, x, kind):
        self.calls[kind] += 1
        return x.copy_(torch.stack(self.meeting.exchange(self.rank, x)).sum(0))

    def all_gather(self, x, kind):
        self.calls[kind] += 1
        return torch.stack(self.meeting.exchange(self.rank, x))


def on_thread_ranks(size, experts, work, *, name, device, dtype):
    """Return what work(pair) returns on each rank."""
    meeting = Meeting(size)

    def one(rank):
        try:
            # A group that is there, though nothing is sent over it: the slices do not run alone.
            return work(slice_pair(name, ThreadRanks(rank, size, experts, object(), meeting=meeting), device, dtype))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(size)]]


def slice_pair(name, ranks, device, dtype):
    target_dir, drafter_dir = bundled_pair(name)
    target = plan_target(target_dir, device=device, dtype=dtype, ranks=ranks).read(device)
    drafter = plan_drafter(drafter_dir, dtype=dtype, ranks=ranks).read(device)
    tokenizer = load_tokenizer(target_dir)
    return Pair(target, drafter, tokenizer, name, "", "", torch.device(device), dtype)
