"""Made-up launches of a round, for tests of tables, figures and the command line."""

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
