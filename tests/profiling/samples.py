"""Made-up launches of a round, for tests of tables, figures and the command line."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kdlab.profiling import launches_frame

PROVENANCE = {"run_id": "1", "gpu": "NVIDIA H200", "gpu_uuid": "GPU-1", "git_commit": "abc", "git_dirty": False}
STAGES = ("draft layers", "tree_build", "attention", "experts", "lm_head", "accept", "commit")


def launch(position, stage, **columns):
    """One launch of an eager round, ten microseconds long."""
    own = {"source": "ncu", "subject": "round", "case": "mini", "mode": "eager", "repeat": 0, "simulated": False}
    sizes = {"rows": 33, "streams": 1, "context": 1024, "layers": 2}
    return {**own, **sizes, "position": position, "stage": stage, "kernel": "k", "duration_us": 10.0, **columns}


def launches(**columns):
    """One launch a stage."""
    rows = [launch(position, stage, **columns) for position, stage in enumerate(STAGES)]
    return launches_frame(rows, PROVENANCE)


@dataclass
class Piece:
    """A piece of work that calls `run`."""

    case: str
    run: Callable[[], object]
    subject: str = "round"
    sizes: dict = field(default_factory=lambda: {"rows": 33, "streams": 1, "context": 64, "layers": 2})
    simulated: bool = False
    capture: Callable[[], Callable[[], object]] | None = None
    prepare: Callable[[], None] = lambda: None
