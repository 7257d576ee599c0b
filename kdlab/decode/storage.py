"""Runs and draft fields on disk: one Parquet file each, rows in the table, the run row as JSON in its metadata."""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from kdlab.decode.field import DraftField
from kdlab.decode.field_table import FIELD_FORMAT, field_columns, prompt_entry, prompt_field
from kdlab.decode.records import Run
from kdlab.decode.round_table import ROUNDS_FORMAT, record_columns, records_of
from kdlab.errors import SchemaError
from kdlab.model.prompts import Prompt
from kdlab.parquet import read_table, write_table

_RUN_KEY = "run"


def save_run(run: Run, path: str | os.PathLike[str]) -> None:
    """Write a run, a row a round: `path` holds all of it afterwards, or is not touched."""
    prompts = [prompt for prompt, rounds in zip(run.prompts, run.rounds, strict=True) for _ in rounds]
    columns = record_columns([record for rounds in run.rounds for record in rounds])
    columns |= {
        "run_id": pa.array([run.provenance.get("run_id")] * len(prompts), pa.string()),
        "prompt_id": pa.array([prompt.id for prompt in prompts], pa.string()),
        "kind": pa.array([prompt.kind for prompt in prompts], pa.string()),
    }
    write_table(path, columns, ROUNDS_FORMAT, {_RUN_KEY: json.dumps(_run_row(run))})


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run that this or an older kdlab saved; its trees are on the CPU.

    Raises:
        SchemaError: the file is no run, is newer than this kdlab, or its parts do not fit.
        TreeError: a recorded tree is none.
        FileNotFoundError: there is no such file.
    """
    table, metadata = read_table(path, ROUNDS_FORMAT)
    row = _run_metadata(path, metadata)
    entries = row["prompts"]
    counts = [entry["num_rounds"] for entry in entries]
    _check_length(path, table, sum(counts))
    records = records_of(table)
    ends = np.cumsum(counts).tolist()
    return Run(
        prompts=[_prompt(entry) for entry in entries],
        prompt_ids=[entry["prompt_ids"] for entry in entries],
        output_ids=[entry["output_ids"] for entry in entries],
        text=[entry["output_text"] for entry in entries],
        rounds=[records[end - count : end] for end, count in zip(ends, counts, strict=True)],
        finish=[entry["finish"] for entry in entries],
        provenance=row["provenance"],
    )


def save_field(field: DraftField, path: str | os.PathLike[str]) -> None:
    """Write a draft field, a row a position of each prompt: `path` holds all of it afterwards, or is not touched."""
    row = {
        "provenance": dict(field.provenance),
        "top_k": int(field.top_k),
        "vocab_size": int(field.vocab_size),
        "depth_limit": int(field.depth_limit),
        "prompts": [prompt_entry(prompt) for prompt in field.prompts],
    }
    columns = field_columns(field.prompts, field.provenance.get("run_id"))
    write_table(path, columns, FIELD_FORMAT, {_RUN_KEY: json.dumps(row)})


def load_field(path: str | os.PathLike[str]) -> DraftField:
    """Read a draft field that this or an older kdlab saved.

    Raises:
        SchemaError: the file is no field, is newer than this kdlab, or its parts do not fit.
        FileNotFoundError: there is no such file.
    """
    table, metadata = read_table(path, FIELD_FORMAT)
    row = _run_metadata(path, metadata)
    counts = [entry["num_positions"] for entry in row["prompts"]]
    _check_length(path, table, sum(counts))
    starts = np.cumsum([0, *counts]).tolist()
    return DraftField(
        prompts=[
            prompt_field(table, start, entry, row["depth_limit"], row["top_k"])
            for start, entry in zip(starts[:-1], row["prompts"], strict=True)
        ],
        top_k=row["top_k"],
        vocab_size=row["vocab_size"],
        depth_limit=row["depth_limit"],
        provenance=row["provenance"],
    )


def _run_row(run: Run) -> dict[str, Any]:
    columns = (run.prompts, run.prompt_ids, run.output_ids, run.text, run.rounds, run.finish)
    entries = [
        {
            "id": prompt.id,
            "kind": prompt.kind,
            "text": prompt.text,
            "token_ids": prompt.token_ids,
            "prompt_ids": [int(token) for token in prompt_ids],
            "output_ids": [int(token) for token in output_ids],
            "output_text": text,
            "num_rounds": len(rounds),
            "finish": finish,
        }
        for prompt, prompt_ids, output_ids, text, rounds, finish in zip(*columns, strict=True)
    ]
    return {"provenance": dict(run.provenance), "prompts": entries}


def _prompt(entry: Mapping[str, Any]) -> Prompt:
    ids = entry["token_ids"]
    return Prompt(entry["id"], entry["kind"], entry["text"], None if ids is None else tuple(ids))


def _run_metadata(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, Any]:
    if _RUN_KEY not in metadata:
        raise SchemaError(f"{os.fspath(path)}: no {_RUN_KEY!r} in its metadata")
    return json.loads(metadata[_RUN_KEY])


def _check_length(path: str | os.PathLike[str], table: pa.Table, expected: int) -> None:
    if table.num_rows != expected:
        raise SchemaError(f"{os.fspath(path)}: expected {expected} rows, as the run row says, got {table.num_rows}")
