"""The recorded files that notebooks draw: those that ship, and made-up ones for each that does not yet."""

from kdlab.bench import write_rows
from kdlab.paths import DATA
from kdlab.profiling import write_launches
from tests.bench.samples import counted_rows, kernel_rows
from tests.profiling.rounds import profiled
from tests.study.rounds import all_reduce_rows, round_rows

RECORDED = DATA / "recorded"


def recorded_rows(folder):
    """The recorded files that ship, and a made-up one for each that does not yet."""
    made = {
        "recorded": ("kernels-h200.parquet", kernel_rows),
        "recorded_counters": ("counters-h200.parquet", counted_rows),
    }
    paths = {}
    for name, (file, rows) in made.items():
        paths[name] = RECORDED / file
        if not paths[name].exists():
            paths[name] = folder / file
            write_rows(rows(), paths[name])
    return {name: str(path) for name, path in paths.items()}


def recorded_launches(folder):
    """The recorded launches and ceilings that ship, or made-up ones of one card."""
    launches, rows = RECORDED / "nsight-h200.parquet", RECORDED / "kernels-h200.parquet"
    if not launches.exists():
        launches, rows = folder / launches.name, folder / f"made-up-{rows.name}"
        write_launches(profiled(prefill=True), launches)
        write_rows(kernel_rows(), rows)
    return {"recorded": str(launches), "recorded_kernels": str(rows)}


def recorded_rounds(folder):
    """The recorded rounds that ship, or made-up ones, of one GPU and of several."""
    recorded = RECORDED / "rounds-h200.parquet"
    if recorded.exists():
        return {}
    made = {"recorded": round_rows(), "recorded_several": round_rows(gpus=4), "recorded_reduces": all_reduce_rows()}
    for name, rows in made.items():
        write_rows(rows, folder / f"{name}.parquet")
    return {name: str(folder / f"{name}.parquet") for name in made}
