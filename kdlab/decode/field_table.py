"""Draft fields as columns of a table, one row a position of the text, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from kdlab.decode.field import PromptField
from kdlab.decode.list_columns import to_list_column, without_nulls
from kdlab.errors import SchemaError
from kdlab.parquet import TableFormat

_LISTS: dict[str, DTypeLike] = {
    "token_ids": np.int32, "log_probs": np.float32, "next_log_prob": np.float32, "next_rank": np.int32,
}  # fmt: skip

FIELD_FORMAT = TableFormat(
    kind="draft_field",
    version=1,
    fields=(
        pa.field("run_id", pa.string()),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("prompt", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("output_id", pa.int32(), nullable=False),
        *(pa.field(name, pa.list_(pa.from_numpy_dtype(dtype)), nullable=False) for name, dtype in _LISTS.items()),
    ),
)
"""`token_ids` and `log_probs` hold L * K values a row, slot after slot; `next_log_prob` and `next_rank` hold L."""


def field_columns(prompts: Sequence[PromptField], run_id: str | None) -> dict[str, pa.ChunkedArray]:
    """Return every column of FIELD_FORMAT, one chunk a prompt."""
    chunks = [_prompt_columns(prompt, run_id) for prompt in prompts]
    types = {field.name: field.type for field in FIELD_FORMAT.fields}
    return {name: pa.chunked_array([chunk[name] for chunk in chunks], kind) for name, kind in types.items()}


def prompt_field(table: pa.Table, start: int, entry: Mapping[str, Any], depth_limit: int, top_k: int) -> PromptField:
    """Give back the field of one prompt, whose rows begin at `start`; `entry` is what the rows do not hold."""
    length = entry["num_positions"]
    shapes = {"token_ids": (length, depth_limit, top_k), "next_rank": (length, depth_limit)}
    shapes |= {"log_probs": shapes["token_ids"], "next_log_prob": shapes["next_rank"]}
    rows = table.slice(start, length)
    order = {"prompt": [entry["prompt"]] * length, "position": range(length)}
    for name, expected in order.items():
        if not np.array_equal(rows[name].to_numpy(), expected):
            raise SchemaError(f"{name}: rows of prompt {entry['prompt_id']!r} are out of order, or another prompt's")
    return PromptField(
        prompt=entry["prompt"],
        prompt_id=entry["prompt_id"],
        kind=entry["kind"],
        prompt_ids=np.array(entry["prompt_ids"], np.int32),
        output_ids=rows["output_id"].to_numpy().astype(np.int32),
        tail_ids=np.array(entry["tail_ids"], np.int32),
        num_starts=entry["num_starts"],
        **{name: _values(rows[name], name, shape) for name, shape in shapes.items()},
    )


def prompt_entry(prompt: PromptField) -> dict[str, Any]:
    """Return what the rows of a prompt do not hold, in JSON form."""
    return {
        "prompt": int(prompt.prompt),
        "prompt_id": prompt.prompt_id,
        "kind": prompt.kind,
        "prompt_ids": prompt.prompt_ids.tolist(),
        "tail_ids": prompt.tail_ids.tolist(),
        "num_starts": int(prompt.num_starts),
        "num_positions": len(prompt.output_ids),
    }


def _prompt_columns(prompt: PromptField, run_id: str | None) -> dict[str, pa.Array]:
    length = len(prompt.output_ids)
    columns: dict[str, pa.Array] = {
        "run_id": pa.array([run_id] * length, pa.string()),
        "prompt_id": pa.array([prompt.prompt_id] * length, pa.string()),
        "kind": pa.array([prompt.kind] * length, pa.string()),
        "prompt": pa.array([prompt.prompt] * length, pa.int32()),
        "position": pa.array(range(length), pa.int32()),
        "output_id": pa.array(prompt.output_ids, pa.int32()),
    }
    for name, dtype in _LISTS.items():
        values = getattr(prompt, name)
        columns[name] = to_list_column(list(values.reshape(length, -1)) if length else [], dtype)
    return columns


def _values(column: pa.ChunkedArray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
    values = without_nulls(flat).to_numpy()
    if values.size != np.prod(shape):
        raise SchemaError(f"{name}: expected {list(shape)} values, got {values.size}")
    return values.reshape(shape).copy()
