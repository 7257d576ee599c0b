"""Verbs that run on several ranks: `--ranks N` starts this command line N times under torchrun."""

import argparse
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdlab.model.ranks import Ranks


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser --ranks and --experts."""
    ranks = "processes that share the models, each on its own GPU with --device cuda (default: %(default)s)"
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help=ranks)
    experts = "with --ranks: tp splits every routed expert, ep gives each rank whole ones (default: %(default)s)"
    parser.add_argument("--experts", default="tp", help=experts)


def add_gpu_option(parser: argparse.ArgumentParser) -> None:
    """Give a parser --gpus."""
    text = "GPUs of this machine, a process each, that talk to one another over NCCL (default: %(default)s)"
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help=text)


def run_on_ranks(arguments: argparse.Namespace, option: str = "ranks") -> int | None:
    """Run the command line on as many ranks of this machine as an option says.

    Args:
        arguments: parsed.
        option: of the number.

    Returns:
        The exit status; None where there is one rank, or this process is one of several that torchrun started.
    """
    from kdlab.checks import check_int

    size = check_int(f"--{option}", getattr(arguments, option), minimum=1)
    if size == 1 or is_started_rank():
        return None
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    threads = {"OMP_NUM_THREADS": "1"}  # which torchrun would set itself, with a banner of five lines
    done = subprocess.run([*launcher, "-m", "kdlab.cli", *arguments.argv], env=threads | os.environ, check=False)
    return int(done.returncode != 0)


def is_started_rank() -> bool:
    """Say whether torchrun started this process, as one of several ranks."""
    import torch.distributed as dist

    return dist.is_torchelastic_launched()


def join_gpus(gpus: int, experts: str = "tp") -> "Ranks":
    """Return this process's place among the ranks that `run_on_ranks` or a torchrun of the user's started.

    Raises:
        ArgumentError: not as many were started. UnsupportedDevice: fewer GPUs than ranks.
    """
    from kdlab.errors import ArgumentError
    from kdlab.model.ranks import init_ranks

    ranks = init_ranks("cuda", experts)
    if ranks.size != gpus:
        ranks.close()
        raise ArgumentError("--gpus", f"the {ranks.size} processes that torchrun started", gpus)
    return ranks


def require_gpus(count: int, what: str) -> None:
    """Raise UnsupportedDevice, before any process is started, when torch finds fewer GPUs."""
    import torch

    from kdlab.errors import UnsupportedDevice

    if torch.cuda.device_count() < count:
        raise UnsupportedDevice(f"{what}: needs {count} GPUs, this machine has {torch.cuda.device_count()}")


def is_first_rank(arguments: argparse.Namespace) -> bool:
    """Say whether this process is the one that tells of its progress."""
    if arguments.ranks == 1:
        return True
    import torch.distributed as dist

    return dist.get_node_local_rank(fallback_rank=0) == 0
