"""Verbs that run on several ranks: `--ranks N` starts this command line N times under torchrun."""

import argparse
import subprocess
import sys


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser --ranks and --experts."""
    ranks = "processes that share the models, each on its own GPU with --device cuda (default: %(default)s)"
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help=ranks)
    experts = "with --ranks: tp splits every routed expert, ep gives each rank whole ones (default: %(default)s)"
    parser.add_argument("--experts", default="tp", help=experts)


def run_on_ranks(arguments: argparse.Namespace) -> int | None:
    """Run the command line on `arguments.ranks` ranks of this machine.

    Returns:
        The exit status; None where there is one rank, or this process is one of several that torchrun started.
    """
    from kdlab.checks import check_int

    size = check_int("--ranks", arguments.ranks, minimum=1)
    if size == 1:
        return None
    import torch.distributed as dist

    if dist.is_torchelastic_launched():
        return None
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    done = subprocess.run([*launcher, "-m", "kdlab.cli", *arguments.argv], check=False)
    return int(done.returncode != 0)


def is_first_rank(arguments: argparse.Namespace) -> bool:
    """Say whether this process is the one that tells of its progress."""
    if arguments.ranks == 1:
        return True
    import torch.distributed as dist

    return dist.get_node_local_rank(fallback_rank=0) == 0
