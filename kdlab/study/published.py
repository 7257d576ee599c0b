"""Acceptance of Kimi K2 models that others published: means without their rounds, each with its source."""

import os

import pandas as pd

from kdlab.errors import SchemaError
from kdlab.paths import DATA

_NUMBERS = ("drafted", "tokens_per_round", "temperature", "concurrency")
_COLUMNS = (
    "target", "drafter", "method", "drafted", "tokens_per_round", "figure", "bonus", "workload", "temperature",
    "engine", "gpu", "concurrency", "source", "second_hand",
)  # fmt: skip


def published_acceptance(path: str | os.PathLike[str] | None = None) -> pd.DataFrame:
    """Read published tokens per round; each row names its source, and none of them can be checked or has an interval.

    Args:
        path: a CSV file of the same columns; None takes the one that ships.

    Returns:
        One row a figure: target, drafter, method ("chain" or "tree"), drafted (nodes a round beside the root),
        tokens_per_round (bonus included), figure ("published", or the sum that made it of a published acceptance
        rate), bonus ("included", or "assumed" where the source does not say it), workload, temperature, engine, gpu,
        concurrency (each NaN where the source does not say), source (address) and second_hand (taken from a summary of
        the source, not from itself).

    Raises:
        SchemaError: other columns, a row without a source, or a figure that no round of so many drafted tokens has.
    """
    file = DATA / "published" / "acceptance.csv" if path is None else path
    try:
        table = pd.read_csv(file, dtype=dict.fromkeys(_NUMBERS, float) | {"second_hand": bool})
    except ValueError as error:  # of pandas' parser too
        raise SchemaError(f"{os.fspath(file)}: {error}") from error
    if tuple(table.columns) != _COLUMNS:
        raise SchemaError(f"{os.fspath(file)}: expected the columns {', '.join(_COLUMNS)}, got {list(table.columns)}")
    for index, row in enumerate(table.to_dict("records"), start=2):
        where = f"{os.fspath(file)}:{index}"
        for name in ("target", "drafter", "workload", "source"):
            if not isinstance(row[name], str):
                raise SchemaError(f"{where}: {name}: expected a text, got {row[name]}")
        if row["method"] not in ("chain", "tree"):
            raise SchemaError(f"{where}: method: expected chain or tree, got {row['method']}")
        if not 1.0 <= row["tokens_per_round"] <= row["drafted"] + 1:
            most = f"1 to {row['drafted'] + 1:g}"
            raise SchemaError(f"{where}: tokens_per_round: expected {most}, got {row['tokens_per_round']}")
    return table.astype({"drafted": int})
