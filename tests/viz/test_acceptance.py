"""Acceptance by depth, rank and length, calibration and missed mass on axes."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from kdlab import study
from kdlab.errors import ArgumentError
from kdlab.viz import (
    depth_findings,
    plot_acceptance_by_depth,
    plot_calibration,
    plot_length_histogram,
    plot_missed_mass,
    plot_rank_heatmap,
    png_bytes,
)
from tests.viz.samples import DEPTH, make_field


def test_depth_bars_are_the_cumulative_shares(field):
    table = study.acceptance_by_depth(field, 15)
    ax = plot_acceptance_by_depth(table)
    assert [bar.get_height() for bar in ax.patches] == table["cumulative"].tolist()
    assert ax.lines[0].get_ydata().tolist() == pytest.approx(table["conditional"].tolist(), nan_ok=True)
    assert f"{table['num_rounds'].iloc[0]:,} rounds" in ax.get_ylabel()


def test_every_cell_of_the_rank_map_says_its_share(field):
    table = study.acceptance_by_rank(field, 15)
    ax = plot_rank_heatmap(table, max_rank=3)
    assert len(ax.texts) == 3 * DEPTH
    first = table[(table["depth"] == 1) & (table["rank"] == 0)]["conditional"].iloc[0]
    assert ax.texts[0].get_text() == f"{100 * first:.0f}"


def test_an_unreached_cell_is_a_dash():
    rows = [{"depth": 1, "rank": rank, "conditional": value} for rank, value in enumerate((0.5, np.nan))]
    ax = plot_rank_heatmap(pd.DataFrame(rows))
    assert [text.get_text() for text in ax.texts] == ["50", "–"]


def test_length_bars_sum_to_one_an_arm(table):
    arms = table[(table["method"] == "chain") | ((table["method"] == "ddtree") & table["setting"].isin([4]))]
    histogram = study.length_histogram(arms[arms["setting"].isin([1, 4])])
    ax = plot_length_histogram(histogram)
    assert sum(bar.get_height() for bar in ax.patches) == pytest.approx(3.0)
    assert "bonus" in ax.get_xlabel()
    with pytest.raises(ArgumentError, match="arms"):
        plot_length_histogram(study.length_histogram(table))


def test_calibration_shows_chosen_depths_and_their_errors(field):
    ax = plot_calibration(study.calibration(field), depths=[1, 4])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label.split(",")[0] for label in labels] == ["calibrated", "depth 1", "depth 4"]
    png_bytes(ax, 50)


def test_missed_mass_has_four_lines():
    ax = plot_missed_mass(study.missed_mass(make_field(top_k=4)))
    assert len(ax.lines) == 4


def test_captions_name_device_and_commit_inside_the_figure(field):
    provenance = {"device": "cpu", "cpu": "A" * 40, "threads": 2, "pair": "p $x$", "git_commit": "0123456789ab"}
    for ax in (
        plot_acceptance_by_depth(study.acceptance_by_depth(field, 4), provenance=provenance),
        plot_calibration(study.calibration(field), provenance=provenance),
    ):
        png_bytes(ax, ax.figure.dpi)
        (line,) = [text for text in ax.texts if "commit" in text.get_text()]
        assert "012345678" in line.get_text().replace("\n", " ")
        assert "2 threads" in line.get_text().replace("\n", " ")
        assert ax.figure.bbox.x1 >= line.get_window_extent().x1
        assert line.get_window_extent().y0 >= 0
        assert not line.get_parse_math()
    assert plt.get_fignums() == []


def test_calibration_bars_are_wilson_intervals_and_are_explained():
    rows = [{"depth": 1, "num_entries": entries, "mean_predicted": 0.4, "observed": 0.5, "calibration_error": 0.1}
            for entries in (10, 1000)]  # fmt: skip
    ax = plot_calibration(pd.DataFrame(rows))
    bars = [collection for collection in ax.collections if hasattr(collection, "get_segments")]
    (low, high), (low_many, high_many) = [segment[:, 1] for segment in bars[0].get_segments()]
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # Wilson interval of 5 of 10
    assert low < low_many < 0.5 < high_many < high
    assert "fewer candidates" in ax.get_legend().get_title().get_text()


def test_depth_sentences_follow_the_line():
    def table(*shares):
        return pd.DataFrame({"depth": range(1, len(shares) + 1), "conditional": shares, "num_reached": 50})

    assert "It falls with every depth" in depth_findings(table(0.9, 0.8, 0.5))
    risen = depth_findings(table(0.9, 0.6, 0.8, np.nan))
    assert "does not fall with every depth" in risen
    assert "90 % are accepted there at best (depth 1) and 60 % at worst (depth 2)" in risen
    assert "none went deeper" in depth_findings(table(0.25, np.nan))
    assert depth_findings(table(np.nan)) == "No round drafted anything."
