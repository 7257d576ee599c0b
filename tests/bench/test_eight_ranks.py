"""`kdlab bench round --gpus 8` and `bench collectives --gpus 4` from their command lines, on ranks over gloo.

Models are tiny, rounds run on the CPU, and clocks are the host's. What ranks tell one another, which points they leave
out together, what is written and what is printed is the commands' own.
"""

import json
import math
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import torch

from kdlab.bench import collectives, read_rows, timing, write_rows
from kdlab.bench.full_width import point, suite
from kdlab.bench.full_width.point import Point, Rounds, rounds_at
from kdlab.bench.full_width.random_pair import random_pair
from kdlab.bench.full_width.table import point_table
from kdlab.bench.kernels.ceilings import Ceiling, Ceilings
from kdlab.bench.rows import rows_frame
from kdlab.cli import bench_round as verb
from kdlab.cli import main
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.decode.round import Round
from kdlab.model import ranks as ranks_of
from kdlab.paths import DATA
from tests.bench.test_collectives import collective_rows, round_rows
from tests.rank_processes import run_ranks, values_of

GPUS, CONTEXT, FULL = 8, 24, 3
NO_ROOM, TREE = Point(2, 1, CONTEXT, 0.8), Point(9, 2, CONTEXT, 0.8)


class HostEvent:
    """What CUDA's event would be of work on the host."""

    def __init__(self, enable_timing):
        self.at = math.nan

    def record(self):
        self.at = time.perf_counter()

    def query(self):
        return True

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


def tiny_pair(ranks, layers, device):
    target = TargetConfig.load(DATA / "tiny-pair" / "target")
    target = replace(target, num_hidden_layers=2, num_attention_heads=GPUS, moe_intermediate_size=256)
    drafter = DrafterConfig.load(DATA / "tiny-pair" / "drafter")
    drafter = replace(drafter, num_target_layers=2, target_layer_ids=(0, 1), num_attention_heads=GPUS,
                      num_key_value_heads=GPUS)  # fmt: skip
    return random_pair(target, drafter, ranks=ranks, device=torch.device("cpu"), dtype=torch.float32)


def run_command(rank, *line):
    """Run one rank of a command, with the GPU's part made up; returns its status."""
    make_up_gpus(rank)
    return main([*line])


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
    suite.rank_points = lambda: [(one, False) for one in (NO_ROOM, TREE)]
    Round.capture, Rounds.place, point.rounds_at = lambda self: None, on_the_cpu, rounds
    torch.cuda.Event, torch.cuda.synchronize = HostEvent, lambda: None
    timing._MIN_SAMPLES, point._FEWEST_TURNS, point._MOST_TURNS, point._SPARE_ROWS = 1, 2, 2, 256
    collectives.capture = lambda calls: SimpleNamespace(replay=calls[0])
    collectives.LINKS, collectives.ROWS = 1, (1, 40)


def test_eight_ranks_time_their_rounds_leave_out_what_one_has_no_room_for_and_tell_of_it(tmp_path):
    rounds, times = str(tmp_path / "rounds.parquet"), str(tmp_path / "times.parquet")
    write_rows(collective_rows(ranks=GPUS), times)
    line = ["bench", "round", "--gpus", str(GPUS), "--experts", "ep", "--collectives", times, "--out", rounds]
    ended = run_ranks(GPUS, run_command, *line, folder=tmp_path)
    assert values_of(ended) == [0] * GPUS
    first, *others = (one.said for one in ended)
    assert not "".join(others).strip()
    assert f"{NO_ROOM}: left out, another rank has no room for it" in first
    assert "rounds over several GPUs, and the slice of one rank with the collectives added" in first
    assert "slice + collectives: " in first
    rows = read_rows(rounds)
    assert set(rows["metric"]) == {"round", "floor", "loop", "row", "slice"}
    assert rows["simulated"].all()
    facts = json.loads(rows["provenance"].iloc[0])
    assert (facts["target_config"]["num_hidden_layers"], facts["drafter_config"]["num_target_layers"]) == (2, 2)
    (point,) = point_table(rows).to_dict("records")
    assert (point["rows"], point["gpus"], point["ranks"], point["experts"]) == (TREE.rows, GPUS, GPUS, "ep")
    assert all(math.isfinite(point[name]) for name in ("us", "floor_us", "unrested", "gap"))


def test_collectives_are_timed_over_two_ranks_and_over_four(tmp_path):
    times = str(tmp_path / "times.parquet")
    line = ["bench", "collectives", "--gpus", "4", "--seconds", "0.2", "--out", times]
    ended = run_ranks(4, run_command, *line, folder=tmp_path)
    assert values_of(ended) == [0] * 4
    assert not "".join(one.said for one in ended[1:]).strip()
    timed = collectives.collective_table(read_rows(times))
    assert set(timed["ranks"]) == {2, 4}
    assert set(timed["op"]) == {"all_reduce", "all_gather"}


def test_collectives_of_other_ranks_are_said_to_compare_with_nothing(tmp_path, capsys):
    write_rows(rows_frame(round_rows(15_000.0, 9000.0, gpus=GPUS)), tmp_path / "rounds.parquet")
    write_rows(collective_rows(ranks=2), tmp_path / "times.parquet")
    files = ["--read", str(tmp_path / "rounds.parquet"), "--collectives", str(tmp_path / "times.parquet")]
    assert main(["bench", "round", *files]) == 0
    printed = capsys.readouterr().out
    assert "slice + collectives: not compared, collectives: expected times of all_reduce over 8 ranks" in printed


def test_rounds_without_their_slices_are_said_to_compare_with_nothing(tmp_path, capsys):
    rows = rows_frame(round_rows(15_000.0, 9000.0, gpus=GPUS))
    write_rows(rows[rows["metric"] != "slice"], tmp_path / "rounds.parquet")
    write_rows(collective_rows(ranks=GPUS), tmp_path / "times.parquet")
    files = ["--read", str(tmp_path / "rounds.parquet"), "--collectives", str(tmp_path / "times.parquet")]
    assert main(["bench", "round", *files]) == 0
    assert "not compared, no round of several GPUs has its slice timed" in capsys.readouterr().out
