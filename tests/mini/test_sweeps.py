"""The recorded acceptance of the bundled pair: every temperature, every arm, and the command that writes it."""

import sys

from kdlab.mini import sweeps
from kdlab.study.sweep_file import load_sweeps


def test_every_temperature_and_arm_is_recorded(tmp_path, monkeypatch, capsys):
    out = tmp_path / "acceptance.parquet"
    monkeypatch.setattr(sweeps, "TEMPERATURES", (0.0, 1.0))
    monkeypatch.setattr(sys, "argv", ["sweeps", "--out", str(out), "--per-kind", "1", "--max-new-tokens", "4"])
    sweeps.main()
    table = load_sweeps(out)
    assert set(table["temperature"]) == {0.0, 1.0}
    assert set(table["kind"]) == {"code", "math", "structured", "prose"}
    assert set(table.loc[table["method"] == "ddtree", "setting"]) == set(map(float, sweeps.BUDGETS))
    assert set(table["method"]) == {"ddtree", "adaptive_tree", "chain", "adaptive_chain", "ar"}
    assert f"{len(table)} rows" in capsys.readouterr().out


def test_the_shipped_file_has_every_prompt_at_every_temperature():
    table = load_sweeps(sweeps.PATH)
    assert table.groupby(["temperature", "method", "setting"])["prompt"].nunique().eq(96).all()
    assert set(table["temperature"]) == set(sweeps.TEMPERATURES)
    assert not table.query("temperature > 0")["loop"].any()
    assert all(set(lengths) <= {1} for lengths in table.query("method == 'ar'")["round_lengths"])
