"""Round records as columns of a table, and back."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import DTypeLike

from kdlab.decode.list_columns import from_list_column, to_list_column
from kdlab.decode.records import RoundRecord
from kdlab.errors import KdlabError, SchemaError, TreeError
from kdlab.parquet import TableFormat
from kdlab.tree import check_tree
from kdlab.tree.draft_tree import DraftTree

_NUMBERS = ("prompt", "round", "anchor_position", "bonus", "num_tokens", "nonfinite_draft_rows", "depth_limit")
_TREE_LISTS: dict[str, tuple[str, DTypeLike]] = {
    "tokens": ("token", np.int32), "parents": ("parent", np.int32), "depths": ("depth", np.int32),
    "log_probs": ("logp", np.float32), "ranks": ("rank", np.int32), "missed_mass": ("missed_mass", np.float32),
}  # fmt: skip
"""Column: (field of DraftTree, dtype); `log_probs` are summed along the path, `missed_mass` is one value a depth."""
_EXPERT_DIMS = 3  # [moe layers, N, k]

ROUNDS_FORMAT = TableFormat(
    kind="rounds",
    version=1,
    fields=(
        pa.field("run_id", pa.string()),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        *(pa.field(name, pa.int32(), nullable=False) for name in _NUMBERS),
        pa.field("truncated", pa.bool_(), nullable=False),
        *(
            pa.field(name, pa.list_(pa.from_numpy_dtype(dtype)), nullable=False)
            for name, (_, dtype) in _TREE_LISTS.items()
        ),
        pa.field("target_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("path", pa.list_(pa.int32()), nullable=False),
        pa.field("expert_ids", pa.list_(pa.list_(pa.list_(pa.int16())))),
    ),
)


def record_columns(records: Sequence[RoundRecord]) -> dict[str, pa.Array]:
    """Return every column of ROUNDS_FORMAT that a record fills: all but run id, prompt id and kind."""
    trees = [record.tree for record in records]
    numbers = {name: [getattr(record, name) for record in records] for name in _NUMBERS if name != "depth_limit"}
    numbers["depth_limit"] = [tree.depth_limit for tree in trees]
    columns: dict[str, pa.Array] = {name: pa.array(values, pa.int32()) for name, values in numbers.items()}
    for name, (field, dtype) in _TREE_LISTS.items():
        columns[name] = to_list_column([getattr(tree, field)[0].cpu().numpy() for tree in trees], dtype)
    return columns | {
        "truncated": pa.array([bool(tree.truncated[0]) for tree in trees], pa.bool_()),
        "target_tokens": to_list_column([record.target_tokens for record in records], np.int32),
        "path": to_list_column([np.array(record.path, np.int32) for record in records], np.int32),
        "expert_ids": to_list_column([record.expert_ids for record in records], np.int16, _EXPERT_DIMS),
    }


def records_of(table: pa.Table) -> list[RoundRecord]:
    """Give back the records of a table in ROUNDS_FORMAT, in its order, with trees on the CPU.

    Raises:
        TreeError: the parents of a row are no tree.
        SchemaError: the lists of a row do not fit together.
    """
    lists = {name: from_list_column(table[name]) for name in (*_TREE_LISTS, "target_tokens", "path")}
    experts = from_list_column(table["expert_ids"], _EXPERT_DIMS)
    rows = table.select([*_NUMBERS, "truncated"]).to_pylist()
    records = []
    for i, row in enumerate(rows):
        try:
            tree = _tree(row, {name: column[i] for name, column in lists.items()})
        except KdlabError as error:
            raise (TreeError if isinstance(error, TreeError) else SchemaError)(f"row {i}: {error}") from error
        record = RoundRecord(
            prompt=row["prompt"],
            round=row["round"],
            anchor_position=row["anchor_position"],
            tree=tree,
            target_tokens=lists["target_tokens"][i],
            path=tuple(lists["path"][i].tolist()),
            bonus=row["bonus"],
            expert_ids=experts[i],
            nonfinite_draft_rows=row["nonfinite_draft_rows"],
        )
        _check_record(f"row {i}", record, row["num_tokens"])
        records.append(record)
    return records


def _check_record(where: str, record: RoundRecord, num_tokens: int) -> None:
    """Raise SchemaError unless a record's path leads down its tree by the target's tokens."""
    num_rows, experts = record.tree.capacity, record.expert_ids
    parent, token, path = record.tree.parent[0].tolist(), record.tree.token[0].tolist(), record.path
    wanted = record.target_tokens.tolist()
    if len(wanted) != num_rows or (experts is not None and experts.shape[1] != num_rows):
        raise SchemaError(f"{where}: expected target_tokens and expert_ids of {num_rows} nodes, got {len(wanted)}")
    if not path or path[0] != 0 or len(path) != num_tokens or not all(0 <= row < num_rows for row in path):
        raise SchemaError(f"{where}: path: expected {num_tokens} of {num_rows} nodes from the root, got {path}")
    for up, row in itertools.pairwise(path):
        if parent[row] != up or token[row] != wanted[up]:
            raise SchemaError(f"{where}: path: node {row} is not the child of node {up} that the target wrote")
    if record.bonus != wanted[path[-1]]:
        raise SchemaError(f"{where}: bonus: expected {wanted[path[-1]]}, the target's token, got {record.bonus}")
    if record.anchor_position < 0:
        raise SchemaError(f"{where}: anchor_position: expected at least 0, got {record.anchor_position}")


def _tree(row: dict[str, int], lists: dict[str, np.ndarray]) -> DraftTree:
    """Rebuild depths and links from the parents, which checks them, and put back what the parents do not tell."""
    tensors = [torch.from_numpy(lists[name])[None] for name in ("tokens", "parents", "log_probs", "ranks")]
    tree = dataclasses.replace(
        DraftTree.from_parents(*tensors),
        missed_mass=torch.from_numpy(lists["missed_mass"])[None],
        truncated=torch.tensor([row["truncated"]]),
        nonfinite_rows=torch.tensor([row["nonfinite_draft_rows"]], dtype=torch.int32),
        depth_limit=row["depth_limit"],
    )
    check_tree(tree)
    if lists["depths"].tolist() != tree.depth[0].tolist():
        raise SchemaError(f"depths: expected {tree.depth[0].tolist()}, got {lists['depths'].tolist()}")
    return tree
