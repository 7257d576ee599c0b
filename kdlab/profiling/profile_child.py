"""`python -m kdlab.profiling.profile_child TASK`: what `kdlab.profiling.profile` starts under Nsight Compute."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """Run the work of a task (JSON) in ranges, and leave what it was; status 1 after a sentence of what went wrong."""
    from kdlab.bench.profiled import profiled
    from kdlab.errors import KdlabError
    from kdlab.profiling import run_marked

    task = json.loads(arguments[0])
    try:
        subjects = [profiled(**options) for options in task["options"]]
        run_marked(subjects, Path(task["facts"]), layers=task["layers"], until=task["until"])
    except KdlabError as error:
        print(" ".join(str(error).split()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
