"""Recorded result rows gathered from folders: one document is about one GPU and one set of runs, or it is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kdlab.errors import ArgumentError
from kdlab.parquet import table_kind
from kdlab.study.compare import ACCEPTANCE_FIELDS, check_comparable

GPU_FIELDS = ("gpu", "gpu_uuid")
"""Of rows that stand in one document: two cards of one kind differ enough to be told apart."""
_SHOWN = ("gpu", "device", "pair", "temperature", "prompt_set_id", "num_prompts", "git_commit", "started_utc")


def recorded_files(folder: str | Path) -> list[Path]:
    """Return the files of result rows and draft fields in a folder, in the order of their names.

    Raises:
        SchemaError: a file that ends in .parquet is damaged.
    """
    paths = sorted(Path(folder).glob("*.parquet"))
    return [path for path in paths if table_kind(path) in ("bench_rows", "draft_field")]


def file_provenance(path: str | Path) -> dict[str, Any]:
    """Return the provenance that a file of result rows or a draft field states, the first row's of result rows.

    Raises:
        ArgumentError: it is neither, or it has no rows.
        SchemaError: it is damaged.
    """
    from kdlab.bench import read_rows
    from kdlab.decode import load_field

    kind = table_kind(Path(path))
    if kind == "draft_field":
        return dict(load_field(path).provenance)
    if kind != "bench_rows":
        raise ArgumentError("path", "result rows or a draft field", f"{path}, a table of kind {kind}")
    rows = read_rows(path)["provenance"].unique()
    if not len(rows):
        raise ArgumentError("path", "at least one row", f"{path}, which has none")
    known = [json.loads(row) for row in rows]
    check_comparable(known, fields=(*GPU_FIELDS, *ACCEPTANCE_FIELDS))
    return dict(known[0])


def check_one_document(gpu_files: Sequence[str | Path], decode_files: Sequence[str | Path]) -> pd.DataFrame:
    """Refuse files that no document should put together.

    Args:
        gpu_files: of measurements of a GPU: they must be of one card.
        decode_files: of one pair's acceptance and round times: models, prompts, template, temperature and all else that
            decides a text must be the same.

    Returns:
        One row a file: its name and what its provenance says of machine, commit, date and run.

    Raises:
        ComparisonError: the first field that differs, with both values.
        ArgumentError: a file is neither result rows nor a draft field.
    """
    known = {Path(path).name: file_provenance(path) for path in (*gpu_files, *decode_files)}
    check_comparable([known[Path(path).name] for path in gpu_files], fields=GPU_FIELDS)
    check_comparable([known[Path(path).name] for path in decode_files], fields=ACCEPTANCE_FIELDS)
    rows = [{"file": name} | {field: facts.get(field) for field in _SHOWN} for name, facts in known.items()]
    return pd.DataFrame.from_records(rows)
