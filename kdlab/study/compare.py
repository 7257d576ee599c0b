"""What may stand side by side: results that differ only in what is compared, and headlines from real text alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kdlab.errors import ComparisonError
from kdlab.provenance import COMPARED_FIELDS

# How the recording was decoded (streams, graph) does not change what it says, so acceptance is compared without them.
ACCEPTANCE_FIELDS = tuple(name for name in COMPARED_FIELDS if name not in ("streams", "graph"))
# Engines that state no hashes are told apart by the names they give; unequal engines and methods are what is compared.
TRACE_FIELDS = (*ACCEPTANCE_FIELDS, "target", "drafter", "prompt_set_id")
COST_FIELDS = (*COMPARED_FIELDS, "concurrency", "overlap", "context", "device", "gpu", "gpu_uuid")

# Kind of the prompts that are drawn at random from the vocabulary: drafting of such text says nothing about real text.
RANDOM_KIND = "random"


def check_comparable(provenances: Sequence[Mapping[str, Any]], *, fields: Sequence[str] = COST_FIELDS) -> None:
    """Refuse results whose provenance differs.

    Args:
        provenances: one dictionary a result; a field that is missing equals one that is None or NaN (not known), and
            what is not known differs from everything that is.
        fields: names to compare; leave out what the comparison is about.

    Raises:
        ComparisonError: the first field that differs, with two of its values.
    """
    for name in fields:
        _check_equal(name, [provenance.get(name) for provenance in provenances])


def check_table(table: pd.DataFrame, *, fields: Sequence[str] = ACCEPTANCE_FIELDS) -> None:
    """Refuse a table whose rows differ in one of `fields` (those that are columns of it), as `check_comparable`."""
    for name in fields:
        if name in table.columns:
            _check_equal(name, list(table[name].unique()))


def check_headline(table: pd.DataFrame) -> None:
    """Refuse to take a headline from simulated acceptance, random weights or random-token prompts.

    Args:
        table: rows of a study or cost table with the flag column `simulated`.

    Raises:
        ComparisonError: a row is flagged, or the column is missing.
    """
    if "simulated" not in table.columns:
        raise ComparisonError("simulated: a headline needs this column to say that its rows were measured")
    flagged = int(table["simulated"].astype(bool).sum())
    if flagged:
        raise ComparisonError(f"simulated: {flagged} of {len(table)} rows are, a headline needs measured ones")


def is_simulated(provenance: Mapping[str, Any], kind: str) -> bool:
    """True where acceptance is no measurement: by its provenance (`simulated`, `random_weights`), or random text."""
    return bool(provenance.get("simulated") or provenance.get("random_weights")) or kind == RANDOM_KIND


def _check_equal(name: str, values: Sequence[Any]) -> None:
    known = [_known(value) for value in values]
    for value in known[1:]:
        if value != known[0]:
            raise ComparisonError(f"{name}: results with {known[0]!r} and {value!r} cannot be compared")


def _known(value: Any) -> Any:
    """Return None for every way a table writes "not known", the value itself otherwise."""
    return None if pd.api.types.is_scalar(value) and pd.isna(value) else value
