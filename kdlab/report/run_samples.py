"""What a point of a named run measured prompt by prompt: its result rows with samples, and its draft fields."""

import json
from pathlib import Path

import pandas as pd

from kdlab.parquet import table_kind

BUDGETS = (7, 15, 31, 63)  # at which draft fields are compared
FIELD_OP = "draft field"
COLUMNS = ["op", "case", "method", "setting", "metric", "unit", "prompt", "value", "simulated", "provenance"]


def point_samples(folder: Path) -> pd.DataFrame:
    """Return what the tables of a folder hold a prompt.

    Args:
        folder: of the executed notebooks; kdlab tables of other kinds, and other files, are passed over.

    Returns:
        COLUMNS, one row a (measurement, prompt), in no order: of result rows the median of the prompt's samples, of a
        draft field its tokens per round at BUDGETS and with the longest chain.

    Raises:
        SchemaError: a table is damaged, or newer than this kdlab.
    """
    found = [pd.DataFrame(columns=COLUMNS)]
    for path in sorted(folder.glob("*.parquet")):
        kind = table_kind(path)
        if kind == "bench_rows":
            found.append(_from_rows(path))
        elif kind == "draft_field":
            found.append(_from_field(path))
    return pd.concat([table for table in found if len(table)] or found, ignore_index=True)


def _from_rows(path: Path) -> pd.DataFrame:
    from kdlab.bench import read_rows

    rows = read_rows(path)
    rows = rows[rows["samples"].notna() & rows["sample_prompts"].notna()]
    long = rows.explode(["samples", "sample_prompts"], ignore_index=True)
    long = long.rename(columns={"samples": "sample", "sample_prompts": "prompt"}).astype({"sample": float})
    keys = [name for name in COLUMNS if name != "value"]
    return long.groupby(keys, dropna=False, sort=False)["sample"].median().rename("value").reset_index()[COLUMNS]


def _from_field(path: Path) -> pd.DataFrame:
    from kdlab.decode import load_field
    from kdlab.study import sweep, sweep_chains

    field = load_field(path)
    budgets = [budget for budget in BUDGETS if budget <= field.top_k]
    chains = sweep_chains(field)
    table = pd.concat([sweep(field, budgets), chains[chains["setting"] == chains["setting"].max()]], ignore_index=True)
    values = [sum(lengths) / len(lengths) if len(lengths) else float("nan") for lengths in table["round_lengths"]]
    facts = {"op": FIELD_OP, "case": "{}", "metric": "recorded_tokens_per_round", "unit": "tokens"}
    table = table.assign(value=values, provenance=json.dumps(field.provenance, sort_keys=True), **facts)
    return table.loc[table["value"].notna(), COLUMNS]
