"""Ranks: the processes that share one model, which part of each tensor is whose, and what they tell one another.

Attention heads, inner widths and the vocabulary are split evenly ("tensor parallel"); norms, the router, the low-rank
projections and the latent cache stand on every rank. All ranks run the same rounds in lockstep: what is decided from a
collective's result is decided alike everywhere.
"""

import gc
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kdlab.checks import check_choice, check_float, check_int
from kdlab.errors import ArgumentError, KdlabError, NotSupported, UnsupportedDevice
from kdlab.model.rank_watch import RankWatch

EXPERT_MODES = ("tp", "ep")
# Ranks may be minutes apart when they have read their weights; a dead rank is RankWatch's to find.
_SLOWEST = timedelta(minutes=30)
_MOST_S = 1e6  # torch counts in milliseconds of 32 bits, and takes longer ones for none
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@dataclass(frozen=True, eq=False)
class Ranks:
    """One process's place among the ranks.

    Attributes:
        rank: of this process, 0..size - 1.
        size: ranks in all.
        experts: "tp" splits the inner width of every routed expert, "ep" gives each rank whole experts.
        group: over which they talk; None for one rank, or for one slice of several that is timed alone.
        calls: collectives so far by kind: "embedding", "attention", "mlp", "drafter", "head", "vocabulary", "check".
        watch: ends this process when another rank dies.
        missing: of the ranks, the last ones, which do not run; copies of the others' parts stand for theirs.
        device: that the group sends from; None is the CPU.
    """

    rank: int = 0
    size: int = 1
    experts: str = "tp"
    group: dist.ProcessGroup | None = None
    calls: Counter[str] = field(default_factory=Counter)
    watch: RankWatch | None = None
    missing: int = 0
    device: torch.device | None = None

    def __post_init__(self) -> None:
        check_choice("experts", self.experts, EXPERT_MODES)
        check_int("ranks", self.size, minimum=1)
        check_int("rank", self.rank, minimum=0, maximum=self.size - 1)

    @classmethod
    def slice_of(cls, rank: int, size: int, experts: str = "tp") -> "Ranks":
        """Return one rank of `size` without the others: its shapes and its work; collectives do nothing."""
        return cls(rank, size, experts, missing=size - 1)

    def among(self, size: int) -> "Ranks":
        """Return these ranks as the first of `size`: they share the work as so many would, and the others are missing.

        What such ranks decode means nothing, as summands are missing; it takes them the time of one among `size`.

        Raises:
            ArgumentError: fewer than they are.
        """
        check_int("ranks", size, minimum=self.size)
        return replace(self, size=size, missing=size - self.size)

    def first(self, size: int) -> "Ranks | None":
        """Return the first `size` of these ranks with a group of their own, None on the others; every rank asks.

        Raises:
            ArgumentError: more than there are.
        """
        check_int("ranks", size, minimum=1, maximum=self.size)
        group = dist.new_group(range(size))
        return replace(self, size=size, group=group, calls=Counter()) if self.rank < size else None

    def shifts(self, device: torch.device, width: int = 1) -> Tensor:
        """Return how far each part of `all_gather` is from the rank that it came from, [size] i32: 0 unless copied.

        Args:
            device: of the result.
            width: that a rank counts as.
        """
        first, last = -self.rank * width, (self.size - self.rank) * width
        if self.group is None:  # copies of this rank's own
            return torch.arange(first, last, width, dtype=torch.int32, device=device)
        every = torch.arange(self.size, dtype=torch.int32, device=device)
        return width * (every - every % (self.size - self.missing))

    def span(self, total: int, unit: int = 1, *, name: str = "size") -> slice:
        """Return this rank's equal part of `total`, in whole units.

        Raises:
            ArgumentError: the ranks do not divide it; `name` says what it is.
        """
        each, rest = divmod(total, self.size * unit)
        if rest:
            units = f" in units of {unit}" if unit > 1 else ""
            raise ArgumentError("ranks", f"a number that divides {name} = {total}{units}", self.size)
        return slice(self.rank * each * unit, (self.rank + 1) * each * unit)

    def shared_span(self, total: int, *, name: str) -> slice:
        """Return this rank's part of `total` heads, or the one it shares with neighbours where the ranks are more."""
        if self.size > total and self.size % total == 0:
            one = self.rank * total // self.size
            return slice(one, one + 1)
        return self.span(total, name=name)

    def all_reduce(self, x: Tensor, kind: str) -> Tensor:
        """Add up x [...] over the ranks, in place, on the current stream; returns it, with equal bits on every rank."""
        if self.size > 1:
            self.calls[kind] += 1
        if self.group is None:
            return x
        try:
            dist.all_reduce(x, group=self.group)
        except RuntimeError:
            self._end_with_the_lost()
            raise
        return x

    def all_gather(self, x: Tensor, kind: str) -> Tensor:
        """Return the x [...] of every rank as [size, ...]; of missing ones a copy of another's."""
        if self.size > 1:
            self.calls[kind] += 1
        if self.group is None:
            return x.expand(self.size, *x.shape)
        running = self.size - self.missing
        out = x.new_empty(running * x.shape[0], *x.shape[1:])
        try:
            _all_gather(out, x.contiguous(), group=self.group)
        except RuntimeError:
            self._end_with_the_lost()
            raise
        parts = out.view(running, *x.shape)
        return parts.repeat(-(-self.size // running), *[1] * x.dim())[: self.size] if self.missing else parts

    def join(self, x: Tensor, kind: str) -> Tensor:
        """Return the columns [..., size * n] of all ranks' x [..., n], in the order of the ranks."""
        if self.size == 1:
            return x
        return self.all_gather(x, kind).movedim(0, -2).flatten(-2)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, one by one: what each found for itself, all decide by alike.

        Args:
            values: as many on every rank.
        """
        if self.group is None:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.all_gather(own, "check").amax(0).tolist()

    def check_same(self, values: Mapping[str, object], device: torch.device) -> None:
        """Check that each value reads the same on every rank: ranks that differ would wait for one another.

        Args:
            values: by the name that an error gives; every rank gives the same names.
            device: for the message, one that the group can send from.

        Raises:
            ArgumentError: names the first value that differs, and the ranks that have another one; on all ranks alike.
        """
        if self.group is None:
            return
        # A set of equal members may read in another order.
        texts = (repr(sorted(value) if isinstance(value, frozenset) else value) for value in values.values())
        digests = b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts)
        own = torch.frombuffer(bytearray(digests), dtype=torch.int64).to(device)
        different = (self.all_gather(own, "check") != own).cpu()  # [ranks, values]
        for name, others in zip(values, different.T, strict=True):
            if others.any():
                got = f"another on rank {self.rank} than on {others.nonzero().flatten().tolist()}"
                raise ArgumentError(name, "the same on every rank", got)

    def close(self) -> None:
        """Take leave of the other ranks, which from now on do without this one; the group ends.

        A rank whose process ends without it counts as lost, and ends the others that still run.
        Drop every engine first: NCCL waits for the graphs that hold its collectives.
        """
        if self.watch is not None:
            self.watch.leave()
        if self.group is not None and dist.is_initialized():
            gc.collect()  # an engine and its graph may be a cycle
            dist.destroy_process_group()

    def _end_with_the_lost(self) -> None:
        """A collective or the store failed: leave it to the watch to find the fault, say it, and end this process."""
        if self.watch is not None:
            self.watch.wait_for_the_end()


ONE_RANK = Ranks()


def init_ranks(
    device: torch.device | str, experts: str = "tp", timeout: float = 20.0, start_timeout: float = 300.0
) -> Ranks:
    """Join the ranks that torchrun started: NCCL for GPUs, gloo for the CPU; again in one process, the same ranks.

    Args:
        device: "cuda" takes the GPU of the process's local rank.
        experts: "tp" or "ep".
        timeout: seconds without a sign of life after which a rank counts as dead and ends the others.
        start_timeout: seconds in which every rank must have made this call.

    Raises:
        KdlabError: a rank did not come in time; it says which.
        ArgumentError: this process was not started as one of several ranks. NotSupported: a GPU by number.
        UnsupportedDevice: fewer GPUs than ranks on this machine.
    """
    check_choice("experts", experts, EXPERT_MODES)
    check_float("timeout", timeout, above=0.0, maximum=_MOST_S)
    start_timeout = check_float("start_timeout", start_timeout, above=0.0, maximum=_MOST_S)
    chosen = local_device(device)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    store = None if dist.is_initialized() else _start_group(backend, chosen, start_timeout)
    if dist.get_backend() != backend:
        raise ArgumentError("device", f"one for {dist.get_backend()}, over which these ranks talk", str(chosen))
    rank, size = dist.get_rank(), dist.get_world_size()
    watch = RankWatch.of_process(rank, size, timeout)
    ranks = Ranks(rank, size, experts, dist.group.WORLD, watch=watch, device=chosen)
    if store is not None:
        try:
            _meet(store, size)
        except RuntimeError:  # the store is gone, or somebody is half an hour late
            ranks._end_with_the_lost()
            raise
    return ranks


def _start_group(backend: str, device: torch.device, start_timeout: float) -> dist.Store:
    """Make the group of all ranks, and return the store that they share."""
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=start_timeout)))
    except RuntimeError as error:  # torch's own launchers hold the store themselves, and do not come here
        raise KdlabError(f"not every rank started (start_timeout {start_timeout:g} s): {error}") from error
    except ValueError as error:  # one of torchrun's environment variables is missing
        expected = "1, or processes that `torchrun --nproc-per-node RANKS` started"
        raise ArgumentError("ranks", expected, "one process alone") from error
    # A second group would take the first one's addresses, which the launcher's store still holds, for its own.
    own = dist.PrefixStore(f"kdlab-{RankWatch.generation}", store)
    _await_all(own, rank, size, start_timeout)
    store.set_timeout(_SLOWEST)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=_SLOWEST, device_id=bound)
    return own


def _await_all(store: dist.Store, rank: int, size: int, seconds: float) -> None:
    """Wait until every rank has started: a collective would wait for one that never does as for one that is slow."""
    signs = [f"rank {one} started" for one in range(size)]
    store.set(signs[rank], "")
    try:
        store.wait(signs, timedelta(seconds=seconds))
    except RuntimeError as error:
        late = [one for one, sign in enumerate(signs) if not store.check([sign])]
        if late:
            raise KdlabError(f"rank {rank} of {size}: ranks {late} did not start within {seconds:g} s") from error


def _meet(store: dist.Store, size: int) -> None:
    """Wait until every rank has its connections: one that ended before would break those that others still make."""
    if store.add("joined", 1) == size:
        store.set("all joined", "")
    store.wait(["all joined"])


def local_device(device: torch.device | str) -> torch.device:
    """Return the device of this process's local rank: "cuda" becomes its own GPU, the CPU is everybody's.

    Raises:
        NotSupported: a GPU by number, which would be every rank's. UnsupportedDevice: there is no such GPU.
    """
    asked = torch.device(device)
    if asked.type != "cuda":
        return asked
    if asked.index is not None:
        raise NotSupported("device", "'cuda' with several ranks: each takes its local rank's GPU", repr(str(device)))
    try:
        index = dist.get_node_local_rank()
    except RuntimeError as error:  # no LOCAL_RANK
        expected = "1, or processes that `torchrun --nproc-per-node RANKS` started"
        raise ArgumentError("ranks", expected, "one process alone") from error
    if index >= torch.cuda.device_count():
        raise UnsupportedDevice(f"local rank {index}: this machine has {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
