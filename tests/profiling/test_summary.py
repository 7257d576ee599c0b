"""The short table of a profile: rounds timed and counted side by side, and ops that were only timed."""

import pandas as pd

from kdlab.profiling import launches_frame, summary_lines, summary_table
from tests.profiling.samples import PROVENANCE, STAGES, launch, launches

COUNTED = launches(dram_read=3e6, dram_write=1e6, tensor_pct=30.0)
TIMED = launches_frame(
    [launch(place, stage, source="torch.profiler", mode=mode, start_us=20.0 * place, duration_us=duration)
     for mode, duration in (("eager", 5.0), ("graph", 8.0)) for place, stage in enumerate(STAGES)],
    PROVENANCE,
)  # fmt: skip


def test_times_are_the_graphs_and_counters_stand_beside_them():
    table = summary_table(pd.concat([TIMED, COUNTED], ignore_index=True))
    assert table["stage"].tolist() == [*STAGES, "nothing runs"]
    first = table.iloc[0]
    assert (first["mode"], first["us"], first["alone_us"], first["GB_s"], first["tensor_pct"]) == (
        "graph", 8.0, 10.0, 400.0, 30.0,
    )  # fmt: skip
    assert abs(table["share"].sum() - 1.0) < 1e-12
    assert summary_lines(TIMED)[0] == "mini, graph: 128 us, 43.8% of it busy; 72 us between 7 launches"


def test_what_was_only_counted_has_no_share():
    table = summary_table(COUNTED)
    assert table["stage"].tolist() == list(STAGES)
    assert table[["us", "share"]].isna().all(axis=None)


def test_ops_that_were_only_timed_have_their_medians():
    shared = {"subject": "kernels", "source": "torch.profiler", "start_us": 0.0}
    rows = [launch(0, "moe_int4", repeat=repeat, duration_us=us, **shared) for repeat, us in enumerate([1.0, 3.0, 9.0])]
    table = summary_table(launches_frame(rows, PROVENANCE))
    assert table[["stage", "launches", "us", "share"]].to_numpy().tolist() == [["moe_int4", 1, 3.0, 1.0]]


def test_nothing_gives_an_empty_table():
    assert summary_table(launches_frame([], PROVENANCE)).empty
    assert summary_lines(launches_frame([], PROVENANCE)) == []
