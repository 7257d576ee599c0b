"""Sweeps kept as one small file: what every arm accepted, prompt by prompt, without the draft field they came from."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from kdlab.column_rules import Rule, finite, json_object
from kdlab.decode.field import DraftField
from kdlab.errors import ArgumentError
from kdlab.parquet import TableFormat, read_table, write_table
from kdlab.study.compare import ACCEPTANCE_FIELDS
from kdlab.study.controls import sweep_adaptive_chains, sweep_adaptive_trees, sweep_chains
from kdlab.study.repetition import repetition
from kdlab.study.sweeps import sweep, sweep_ar
from kdlab.study.walk import COLUMNS


def _is_one_a_round(counts: Sequence[int | None], num_rounds: int) -> bool:
    return len(counts) == num_rounds and all(count is not None and count > 0 for count in counts)


SWEEPS_FORMAT = TableFormat(
    kind="sweeps",
    version=1,
    fields=(
        pa.field("method", pa.string(), nullable=False),
        pa.field("setting", pa.float64(), nullable=False),
        *(pa.field(name, pa.int32(), nullable=False) for name in ("budget", "rows", "prompt", "num_rounds")),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("loop", pa.bool_(), nullable=False),
        *(pa.field(name, pa.list_(pa.int32()), nullable=False) for name in ("round_lengths", "round_rows")),
        *(pa.field(name, pa.bool_(), nullable=False) for name in ("truncated", "simulated")),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("provenance", pa.string(), nullable=False),
    ),
    rules=(
        json_object("provenance"),
        *(finite(name, least=0) for name in ("setting", "budget", "prompt")),
        *(finite(name, least=1) for name in ("rows", "top_k")),
        *(
            Rule((name, "num_rounds"), "a count of at least 1 for each round", _is_one_a_round)
            for name in ("round_lengths", "round_rows")
        ),
    ),
)
"""One row an arm and prompt, as sweeps return them. `loop`: the text of that kind repeats itself too much for a
headline. `provenance` is the field's, as JSON."""


def sweep_arms(field: DraftField, budgets: Sequence[int]) -> pd.DataFrame:
    """Walk a recorded text with every arm: trees of some budgets and adaptive ones, chains, adaptive chains, AR.

    Args:
        field: recorded draft field.
        budgets: of the trees, at most its top K.

    Returns:
        The rows of the sweeps, with `loop` (see `kdlab.study.repetition`) and `provenance` (JSON).
    """
    trees = [sweep(field, budgets), sweep_adaptive_trees(field, max(budgets))]
    table = pd.concat([*trees, sweep_chains(field), sweep_adaptive_chains(field), sweep_ar(field)], ignore_index=True)
    loops = repetition(field).set_index("kind")["loop"]
    return table.assign(loop=table["kind"].map(loops), provenance=json.dumps(dict(field.provenance), sort_keys=True))


def save_sweeps(table: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write rows of `sweep_arms`, several recordings together if need be: `path` holds all of them, or is not touched.

    Raises:
        ArgumentError: a column is missing.
    """
    missing = [field.name for field in SWEEPS_FORMAT.fields if field.name not in table.columns]
    if missing:
        raise ArgumentError("table", "rows of sweep_arms", f"none of {', '.join(missing)}")
    columns = {field.name: pa.array(table[field.name], field.type) for field in SWEEPS_FORMAT.fields}
    write_table(path, columns, SWEEPS_FORMAT)


def load_sweeps(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read what `save_sweeps` wrote, with every column of the sweeps, `loop` and `provenance`.

    Raises:
        SchemaError: the file is no such table.
        FileNotFoundError: there is no such file.
    """
    rows = [_whole(row) for row in read_table(path, SWEEPS_FORMAT)[0].to_pylist()]
    return pd.DataFrame.from_records(rows, columns=[*COLUMNS, "loop", "provenance"])


def _whole(row: Mapping[str, Any]) -> dict[str, Any]:
    known, rounds = json.loads(row["provenance"]), row["num_rounds"]
    means = {
        name: sum(row[of]) / rounds if rounds else float("nan")
        for name, of in (("tokens_per_round", "round_lengths"), ("rows_per_round", "round_rows"))
    }
    return {**row, **means, **{name: known.get(name) for name in ACCEPTANCE_FIELDS}}
