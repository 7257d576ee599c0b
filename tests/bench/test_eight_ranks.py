"""`kdlab bench round --gpus 8` and `bench collectives --gpus 8` from their command lines, on eight ranks over gloo.

Models are tiny, rounds run on the CPU, and clocks are the host's. What ranks tell one another, which points they leave
out together, what is written and what is printed is the commands' own.
"""

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import torch

from kdlab.bench import collectives, read_rows, timing
from kdlab.bench.full_width import point, suite
from kdlab.bench.full_width.point import Point, Rounds, rounds_at
from kdlab.bench.full_width.random_pair import random_pair
from kdlab.bench.full_width.table import point_table
from kdlab.bench.kernels.ceilings import Ceiling, Ceilings
from kdlab.cli import bench_round as verb
from kdlab.cli import main
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.decode.round import Round
from kdlab.model import ranks as ranks_of
from kdlab.paths import DATA
from tests.rank_processes import run_ranks, values_of

GPUS, CONTEXT, FULL = 8, 24, 3
NO_ROOM = Point(2, 1, CONTEXT, 0.8)
AR, TREE = Point(1, 1, CONTEXT, 0.8), Point(9, 2, CONTEXT, 0.8)
POINTS = {"tp": (NO_ROOM, TREE), "ep": (AR, TREE)}


def times_us(runs):
    """What CUDA's events would say of runs on the host."""
    found = []
    for run in runs:
        begin = time.perf_counter()
        run()
        found.append(1e6 * (time.perf_counter() - begin))
    return found


def tiny_pair(ranks, layers, device):
    target = TargetConfig.load(DATA / "tiny-pair" / "target")
    target = replace(target, num_hidden_layers=2, num_attention_heads=GPUS, moe_intermediate_size=256)
    drafter = DrafterConfig.load(DATA / "tiny-pair" / "drafter")
    drafter = replace(drafter, num_target_layers=2, target_layer_ids=(0, 1), num_attention_heads=GPUS,
                      num_key_value_heads=GPUS)  # fmt: skip
    return random_pair(target, drafter, ranks=ranks, device=torch.device("cpu"), dtype=torch.float32)


def commands(rank, folder):
    """Run the commands of one rank, with the GPU's part made up; returns their statuses."""
    times, tp, ep = (str(folder / f"{name}.parquet") for name in ("times", "tp", "ep"))
    several = ["--gpus", str(GPUS), "--seconds"]
    make_up_gpus(rank)
    return [
        main(["bench", "round", *several, "100", "--out", tp]),
        main(["bench", "collectives", *several, "0.2", "--out", times]),
        main(["bench", "round", *several, "100", "--experts", "ep", "--collectives", times, "--out", ep]),
    ]


def make_up_gpus(rank):
    os.environ["TORCHELASTIC_RUN_ID"] = "made up"  # this process is one of torchrun's
    init, place = ranks_of.init_ranks, Rounds.place

    def on_the_cpu(self):
        place(self)
        self.round.streams.anchor.fill_(7)
        if self.round.context is not None:
            self.round.context.length.fill_(CONTEXT)  # which the CPU checks

    def rounds(pair, wanted):
        if wanted == NO_ROOM and rank == FULL:
            raise torch.OutOfMemoryError("none left")
        return rounds_at(pair, wanted)

    ranks_of.init_ranks = lambda device, experts="tp": init("cpu", experts)
    torch.cuda.current_device = lambda: 0
    verb.require_gpus = suite.require_gpu = collectives.require_gpu = lambda *_: None
    ceilings = [Ceiling(name, "TB/s", [1.0], "") for name in ("read", "matrix")]
    suite.measure_ceilings = lambda: Ceilings(tuple(ceilings))
    suite.k26_pair, suite._KEEP_S = tiny_pair, 0.0
    runs = iter(POINTS.values())
    suite.rank_points = lambda: [(one, False) for one in next(runs)]
    Round.capture, Rounds.place, point.rounds_at = lambda self: None, on_the_cpu, rounds
    timing.times_us = point.times_us = times_us
    timing._MIN_SAMPLES, point._FEWEST_TURNS, point._MOST_TURNS, point._SPARE_ROWS = 1, 1, 1, 256
    collectives.capture = lambda calls: SimpleNamespace(replay=calls[0])
    collectives.LINKS, collectives.ROWS = 1, (1, 40)


def test_eight_ranks_time_rounds_and_collectives_write_them_and_tell_of_them(tmp_path):
    ended = run_ranks(GPUS, commands, tmp_path, folder=tmp_path)
    assert values_of(ended) == [[0, 0, 0]] * GPUS
    first, *others = (one.said for one in ended)
    assert not "".join(others).strip()
    assert first.count(f"{NO_ROOM}: left out, another rank has no room for it") == 1
    assert "slice + collectives: not compared, collectives: expected times of all_reduce over 8 ranks" in first
    for experts, wanted in POINTS.items():
        rows = read_rows(tmp_path / f"{experts}.parquet")
        assert set(rows["metric"]) == {"round", "floor", "loop", "row", "slice"}
        assert (rows["simulated"]).all()
        points = point_table(rows)
        assert set(points["gpus"]) == set(points["ranks"]) == {GPUS}
        assert set(points["experts"]) == {experts}
        assert points["rows"].tolist() == [one.rows for one in wanted if one != NO_ROOM]
        assert points[["us", "floor_us", "unrested", "gap"]].notna().all().all()
    timed = collectives.collective_table(read_rows(tmp_path / "times.parquet"))
    assert set(timed["ranks"]) == {2, 4, 8}
    assert first.count("rounds over several GPUs, and the slice of one rank with the collectives added") == 1
    assert "slice + collectives: " in first.split("rounds over several GPUs")[1]
