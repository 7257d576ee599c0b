"""Runs a function on several ranks, each a process of its own, and gives back what it returned on each."""

import multiprocessing
import os
import socket
import sys
import traceback
from dataclasses import dataclass

from torch.distributed import TCPStore

# Processes come from a server that has loaded torch and kdlab once: they start in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["kdlab.decode.engine"])
LIMIT_S = 120.0


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit code (minus the signal that killed it), what it returned, what it printed."""

    exitcode: int
    value: object
    said: str


def run_ranks(size, work, *args, folder):
    """Call work(rank, *args) on each of `size` ranks; returns an Ended each. Output goes through files in `folder`."""
    # As torchrun does, the launcher keeps the store: a rank that ends early takes it from nobody.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes = [
        CONTEXT.Process(target=_enter, args=(rank, size, port, pipes[rank][1], folder / f"rank-{rank}", work, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    values = []
    for process, (receive, send) in zip(processes, pipes, strict=True):
        send.close()
        try:
            values.append(receive.recv() if receive.poll(LIMIT_S) else None)
        except EOFError:  # it died
            values.append(None)
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
    said = [(folder / f"rank-{rank}").read_text() for rank in range(size)]
    return [Ended(process.exitcode, *rest) for process, *rest in zip(processes, values, said, strict=True)]


def values_of(ended):
    """What every rank returned, if all of them ended well."""
    for rank, one in enumerate(ended):
        assert one.exitcode == 0, f"rank {rank} ended with {one.exitcode}: {one.said}"
    return [one.value for one in ended]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _enter(rank, size, port, pipe, output, work, args):
    with open(output, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    import torch

    torch.set_num_threads(1)  # ranks share the cores
    try:
        value = work(rank, *args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)  # at once, as a process that dies would
    pipe.send(value)
    pipe.close()
