"""What the answer rests on: recorded files where they are, floors and models where not, and nothing mixed."""

import pytest

from kdlab.bench.full_width import evidence as sources
from kdlab.bench.full_width.rank_table import MOST_APART
from kdlab.bench.rows import write_rows
from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study.collectives import fit_all_reduce
from kdlab.study.phase import BEST, COMPARISONS
from tests.study import rounds


@pytest.fixture
def files(tmp_path):
    return {name: tmp_path / f"{name}.parquet" for name in ("rounds", "reduces", "several", "whole")}


def test_without_recordings_stages_stand_at_their_floors_and_every_figure_says_so(files):
    found = sources.load_evidence(files)
    assert not found.cost.fit.measured
    assert found.points is None
    assert found.provenance == {}
    assert [line.split(":")[0] for line in found.missing] == ["no rounds.parquet", "no reduces.parquet"]
    assert "NOT MEASURED" in found.notes[0]


def test_recorded_files_take_the_place_of_floors_and_models(files):
    write_rows(rounds.round_rows(), files["rounds"])
    write_rows(rounds.all_reduce_rows(), files["reduces"])
    reduces = fit_all_reduce(rounds.all_reduce_rows())
    write_rows(rounds.round_rows(gpus=4, waits_us=2.0, all_reduce=reduces), files["several"])
    found = sources.load_evidence(files)
    assert found.missing == ()
    assert found.cost.fit.scale == pytest.approx(rounds.SCALE, rel=1e-3)
    assert not found.floor.fit.measured
    assert found.cost.fit.all_reduce.measured_ranks == (2, 4)
    assert "carried on to 8" in found.notes[0]
    assert found.provenance["gpu"] == "a made-up GPU"
    several = found.several.set_index(["rows", "streams", "context", "g"])
    assert len(several) == len(rounds.POINTS)
    one = several.loc[(1, 1, 1024, 0.8)]
    own = found.points.query("stage == 'whole round' and rows == 1 and streams == 1 and context == 1024 and g == 0.8")
    assert found.cost.fit.all_reduce.wait_us == pytest.approx(2.0)
    assert one["measured_us"] > own["measured_us"].item() + 123 * (5.0 + 6 * 0.5 + 2.0)
    assert one["fitted_us"] == pytest.approx(one["measured_us"], rel=1e-2)
    assert one["fitted_us"] == pytest.approx(own["fitted_us"].item() + 123 * (5.0 + 6 * 0.5 + 2.0), rel=1e-2)


def test_rounds_of_the_whole_model_on_eight_gpus_correct_what_a_slice_lets_expect(files):
    write_rows(rounds.round_rows(), files["rounds"])
    write_rows(rounds.all_reduce_rows(ranks=(2, 4, 8)), files["reduces"])
    reduces = fit_all_reduce(rounds.all_reduce_rows(ranks=(2, 4, 8)))
    write_rows(rounds.round_rows(gpus=8, waits_us=12.0, all_reduce=reduces), files["whole"])
    found = sources.load_evidence(files)
    assert set(found.several["gpus"]) == {8}
    assert found.several["residual"].abs().max() < MOST_APART
    assert found.cost.fit.all_reduce.wait_us == pytest.approx(12.0)
    assert "measured on 2 and 4 and 8 GPUs, with 12.0 µs each" in found.notes[0]
    fewer = found.several["fitted_us"] - 12.0 * 123
    assert (fewer / found.several["measured_us"] - 1.0).min() < -MOST_APART, "what it was without the correction"


@pytest.mark.parametrize("name", ["reduces", "several", "whole"])
def test_files_of_different_gpus_are_not_mixed(files, name):
    write_rows(rounds.round_rows(), files["rounds"])
    other = rounds.all_reduce_rows(gpu="another") if name == "reduces" else rounds.round_rows(gpus=4, gpu="another")
    write_rows(other, files[name])
    with pytest.raises(ComparisonError, match="gpu"):
        sources.load_evidence(files)


def test_the_shipped_acceptance_is_a_line_without_loops(files):
    found = sources.load_evidence(files)
    assert [profile.name for profile in found.line.profiles] == ["prose", "code", "structured", "math"]
    assert found.num_prompts == 24
    assert len(found.works()) == sources.NUM_PLACES
    greedy = sources.load_evidence(files, temperature=0.0)
    assert [profile.name for profile in greedy.line.profiles] == ["structured", "math"]
    with pytest.raises(ArgumentError, match="temperature"):
        sources.load_evidence(files, temperature=0.5)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sources, "G", (0.7, 1.0))
    monkeypatch.setattr(sources, "STREAMS", (1, 32))
    monkeypatch.setattr(sources, "CONTEXTS", (1024, 2 * 8192))


def test_the_region_is_whole(files, small):
    table = sources.load_evidence(files).phases(num_resamples=20)
    assert len(table) == sources.NUM_PLACES * 2 * 2 * 2 * 3
    ifs = sources.load_evidence(files).what_ifs(num_resamples=20)
    assert set(ifs) == {"Trees whose rows are more alike than a chain's", "Slower collectives", "Other text"}
    best = table[table["comparison"] == list(COMPARISONS)[1]]
    assert all(len(region) == len(best) for _, region in ifs.values())
    words, slow = ifs["Slower collectives"]
    assert words == "20 us for a small all-reduce inside a round instead of 8.0"
    assert (slow["tok_s"].to_numpy() < best["tok_s"].to_numpy()).all()


def test_measured_rounds_are_held_against_their_floors(files, small):
    write_rows(rounds.round_rows(), files["rounds"])
    found = sources.load_evidence(files)
    words, floor = found.what_ifs(num_resamples=5)["Faster kernels"]
    assert words == "every stage at its floor"
    now = found.phases(comparisons={"best": BEST}, num_resamples=5)
    points = ["work", "g", "streams", "context"]
    assert floor[points].equals(now[points])
    assert set(now["context"]) == {1024}  # no round was recorded at the longer one
    assert (floor["tok_s"] > now["tok_s"]).all()
