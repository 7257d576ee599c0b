"""Fixtures of the viz room: a recording, its sweep, its made-up round times."""

import matplotlib
import pandas as pd
import pytest

from kdlab import study
from tests.viz.samples import make_field


@pytest.fixture(scope="session")
def field():
    return make_field()


@pytest.fixture(scope="session")
def table(field):
    controls = [study.sweep_chains(field), study.sweep_adaptive_chains(field), study.sweep_ar(field)]
    parts = [study.sweep(field, range(33)), *controls]
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="session")
def summary(table):
    return study.summarize(table)


@pytest.fixture(scope="session")
def cost():
    arms = [("ar", 0), ("chain", 1), ("chain", 4), ("ddtree", 4), ("ddtree", 15)]
    rows = [
        {"method": method, "setting": nodes, "rows": nodes + 1, "round_ms": 4.0 + 0.1 * nodes, "context": 50,
         "round_ms_p10": 3.5 + 0.1 * nodes, "round_ms_p90": 5.0 + 0.1 * nodes, "streams": 1, "device": "cpu"}
        for method, nodes in arms
    ]  # fmt: skip
    return study.CostTable(pd.DataFrame(rows))


@pytest.fixture(scope="session")
def speed(summary, cost):
    return study.speed(summary, cost, interpolate=True)


@pytest.fixture(scope="session")
def best(table, cost):
    timed = table[(table["method"] != "ddtree") | table["setting"].isin([4, 15])]
    return study.best_budget(timed, cost, interpolate=True)


@pytest.fixture(scope="session")
def by_kind(table):
    return study.summarize(table, by=("method", "setting", "kind"))


@pytest.fixture(autouse=True)
def untouched_settings():
    """No figure may change matplotlib's global settings, or join its list of open figures."""
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before
    assert plt.get_fignums() == []
