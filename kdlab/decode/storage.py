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
from kdlab.decode.run_row import COUNT, FINISH, IDS, OBJECT, OPTIONAL_IDS, OPTIONAL_TEXT, RUN_KEY, TEXT, read_run_row
from kdlab.errors import ArgumentError, SchemaError, TreeError
from kdlab.model.prompts import Prompt
from kdlab.parquet import read_table, write_table

_RUN_RULES = {"provenance": OBJECT}
_RUN_PROMPT_RULES = {
    "id": TEXT, "kind": TEXT, "text": OPTIONAL_TEXT, "token_ids": OPTIONAL_IDS, "prompt_ids": IDS, "output_ids": IDS,
    "output_text": TEXT, "num_rounds": COUNT, "finish": FINISH,
}  # fmt: skip
_FIELD_RULES = {"provenance": OBJECT, "top_k": COUNT, "vocab_size": COUNT, "depth_limit": COUNT}
_FIELD_PROMPT_RULES = {
    "prompt": COUNT, "prompt_id": TEXT, "kind": TEXT, "prompt_ids": IDS, "tail_ids": IDS, "num_starts": COUNT,
    "num_positions": COUNT,
}  # fmt: skip


def save_run(run: Run, path: str | os.PathLike[str]) -> None:
    """Write a run, a row a round: `path` holds all of it afterwards, or is not touched."""
    if not isinstance(run, Run):
        raise ArgumentError("run", "a Run", type(run).__name__)
    prompts = [prompt for prompt, rounds in zip(run.prompts, run.rounds, strict=True) for _ in rounds]
    columns = record_columns([record for rounds in run.rounds for record in rounds])
    columns |= {
        "run_id": pa.array([run.provenance.get("run_id")] * len(prompts), pa.string()),
        "prompt_id": pa.array([prompt.id for prompt in prompts], pa.string()),
        "kind": pa.array([prompt.kind for prompt in prompts], pa.string()),
    }
    write_table(path, columns, ROUNDS_FORMAT, {RUN_KEY: json.dumps(_run_row(run))})


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run that this or an older kdlab saved; its trees are on the CPU.

    Raises:
        SchemaError: the file is no run, is newer than this kdlab, or its parts do not fit.
        TreeError: a recorded tree is none.
        FileNotFoundError: there is no such file.
    """
    table, metadata = read_table(path, ROUNDS_FORMAT)
    row = read_run_row(os.fspath(path), metadata, _RUN_RULES, _RUN_PROMPT_RULES)
    entries = row["prompts"]
    counts = [entry["num_rounds"] for entry in entries]
    _check_length(path, table, sum(counts))
    try:
        records = records_of(table)
    except (SchemaError, TreeError) as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from error
    owners = [(prompt, number) for prompt, count in enumerate(counts) for number in range(count)]
    if [(record.prompt, record.round) for record in records] != owners:
        raise SchemaError(f"{os.fspath(path)}: its rounds are out of order, or of other prompts than the run row's")
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
    if not isinstance(field, DraftField):
        raise ArgumentError("field", "a DraftField", type(field).__name__)
    row = {
        "provenance": dict(field.provenance),
        "top_k": int(field.top_k),
        "vocab_size": int(field.vocab_size),
        "depth_limit": int(field.depth_limit),
        "prompts": [prompt_entry(prompt) for prompt in field.prompts],
    }
    columns = field_columns(field.prompts, field.provenance.get("run_id"))
    write_table(path, columns, FIELD_FORMAT, {RUN_KEY: json.dumps(row)})


def load_field(path: str | os.PathLike[str]) -> DraftField:
    """Read a draft field that this or an older kdlab saved.

    Raises:
        SchemaError: the file is no field, is newer than this kdlab, or its parts do not fit.
        FileNotFoundError: there is no such file.
    """
    table, metadata = read_table(path, FIELD_FORMAT)
    row = read_run_row(os.fspath(path), metadata, _FIELD_RULES, _FIELD_PROMPT_RULES)
    counts = [entry["num_positions"] for entry in row["prompts"]]
    _check_length(path, table, sum(counts))
    starts = np.cumsum([0, *counts]).tolist()
    try:
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
    except (ArgumentError, SchemaError) as error:
        raise SchemaError(f"{os.fspath(path)}: {error}") from error


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
    try:
        return Prompt(entry["id"], entry["kind"], entry["text"], None if ids is None else tuple(ids))
    except ArgumentError as error:
        raise SchemaError(str(error)) from error


def _check_length(path: str | os.PathLike[str], table: pa.Table, expected: int) -> None:
    if table.num_rows != expected:
        raise SchemaError(f"{os.fspath(path)}: expected {expected} rows, as the run row says, got {table.num_rows}")
