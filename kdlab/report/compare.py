"""Two named runs compared: points and measurements matched, refused where they differ in more than what is compared."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.report.named import NamedRun, Point
from kdlab.report.run_samples import FIELD_OP, point_samples
from kdlab.study.compare import ACCEPTANCE_FIELDS, COST_FIELDS, check_comparable
from kdlab.study.paired import compare_paired, holm

KEY = ["op", "case", "method", "setting", "metric", "unit"]
_PAIRING = "prompt_set_digest"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The second run against the first.

    Attributes:
        first, second: names.
        about: fields that may differ.
        table: one row a measurement in both: point, op, case, method, setting, metric, unit, simulated, the columns of
            `kdlab.study.compare_paired`, and p_adjusted (Holm, over all rows).
        provenances: (point, provenance of the first, of the second), one a matched point.
        unmatched: what only one of them has, in words.
    """

    first: str
    second: str
    about: tuple[str, ...]
    table: pd.DataFrame
    provenances: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]
    unmatched: tuple[str, ...]


def compare_runs(first: NamedRun, second: NamedRun, *, about: Sequence[str] = ()) -> RunComparison:
    """Compare what two finished runs measured on the same prompts.

    Points match where their notebooks were given the same parameters, apart from those named in `about`; where both
    runs have one point, it matches. Measurements match by op, case, method, setting and metric.

    Args:
        first, second: from `find_run`.
        about: names of provenance fields (and of parameters) that the comparison is about, and that may differ.

    Raises:
        ArgumentError: `about` names a field that makes results comparable at all, or one that nothing checks.
        ComparisonError: two matched results differ in another field, which is named, or nothing matches.
        SchemaError: a table of a run is damaged.
    """
    _check_about(about, first, second)
    if first.name == second.name:
        first, second = (dataclasses.replace(run, name=str(run.folder)) for run in (first, second))
    pairs, unmatched = _match_points(first, second, about)
    rows, provenances = [], []
    for one, two in pairs:
        tables = point_samples(one.folder), point_samples(two.folder)
        found, facts, lonely = _compare_point(one.name, *tables, about, (first.name, second.name))
        rows += found
        provenances += facts
        unmatched += lonely
    if not rows:
        raise ComparisonError(
            f"{first.name} and {second.name} hold no measurement of the same prompts to compare"
            + (f" ({'; '.join(unmatched[:3])})" if unmatched else "")
        )
    table = pd.DataFrame.from_records(rows)
    table["p_adjusted"] = holm(table["p_value"].to_numpy())
    return RunComparison(first.name, second.name, tuple(about), table, tuple(provenances), tuple(unmatched))


def _check_about(about: Sequence[str], *runs: NamedRun) -> None:
    if _PAIRING in about:
        raise ArgumentError("about", "fields other than the prompts: results are paired by them", _PAIRING)
    given = {name for run in runs for point in run.points for values in point.parameters.values() for name in values}
    unknown = set(about) - set(COST_FIELDS) - given
    if unknown:
        known = ", ".join(name for name in COST_FIELDS if name != _PAIRING)
        raise ArgumentError("about", f"names among {known}, or parameters of the runs", ", ".join(sorted(unknown)))


def _match_points(
    first: NamedRun, second: NamedRun, about: Sequence[str]
) -> tuple[list[tuple[Point, Point]], list[str]]:
    if len(first.points) == len(second.points) == 1:
        return [(first.points[0], second.points[0])], []
    ones, twos = ({_identity(point, about): point for point in run.points} for run in (first, second))
    for run, points in ((first, ones), (second, twos)):
        if len(points) < len(run.points):
            raise ComparisonError(f"{run.name}: points that differ only in {', '.join(about) or 'nothing'}")
    lonely = [f"point {point.name} only in {first.name}" for key, point in ones.items() if key not in twos]
    lonely += [f"point {point.name} only in {second.name}" for key, point in twos.items() if key not in ones]
    return [(point, twos[key]) for key, point in ones.items() if key in twos], lonely


def _identity(point: Point, about: Sequence[str]) -> str:
    given = {
        stem: {name: value for name, value in values.items() if name not in about}
        for stem, values in point.parameters.items()
    }
    return json.dumps(given, sort_keys=True)


def _compare_point(
    name: str, one: pd.DataFrame, two: pd.DataFrame, about: Sequence[str], runs: tuple[str, str]
) -> tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any], dict[str, Any]]], list[str]]:
    groups = [_groups(table, about, run) for table, run in zip((one, two), runs, strict=True)]
    shared = [key for key in groups[0] if key in groups[1]]
    if not shared:
        _say_what_differs(groups, about)
    rows: list[dict[str, Any]] = []
    facts: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    for key in shared:
        tables = [group[key] for group in groups]
        known = [json.loads(table["provenance"].iloc[0]) for table in tables]
        check_comparable(known, fields=_fields(key[0], about))
        facts.setdefault(key[0], (" ".join(filter(None, (name, key[0]))), *known))
        values = [table.set_index("prompt")["value"] for table in tables]
        made_up = any(table["simulated"].any() for table in tables)
        names = dict(zip(KEY, key, strict=True))
        rows.append({"point": name, **names, "simulated": made_up, **compare_paired(*values)})
    lonely = [
        f"{' '.join(map(str, (key[0], key[2], key[3], key[4])))} only in {run}"
        for run, own, other in zip(runs, groups, reversed(groups), strict=True)
        for key in own
        if key not in other
    ]
    return rows, list(facts.values()), lonely


def _fields(op: str, about: Sequence[str]) -> list[str]:
    fields = ACCEPTANCE_FIELDS if op == FIELD_OP else COST_FIELDS
    return [field for field in fields if field not in about]


def _groups(table: pd.DataFrame, about: Sequence[str], run: str) -> dict[tuple[Any, ...], pd.DataFrame]:
    table = table.assign(case=[_case_without(case, about) for case in table["case"]])
    groups = {}
    for key, group in table.groupby(KEY, sort=False, dropna=False):
        if group["provenance"].nunique() > 1 or group["prompt"].duplicated().any():
            raise ComparisonError(f"{run}: {' '.join(map(str, key))} is there more than once in one folder")
        groups[tuple(None if pd.isna(part) else part for part in key)] = group
    return groups


def _case_without(case: str, about: Sequence[str]) -> str:
    return json.dumps({name: value for name, value in json.loads(case).items() if name not in about}, sort_keys=True)


def _say_what_differs(groups: Sequence[dict[tuple[Any, ...], pd.DataFrame]], about: Sequence[str]) -> None:
    """Raise ComparisonError with the field that keeps the closest two measurements apart, if there are such."""
    for key, table in groups[0].items():
        for other, rows in groups[1].items():
            if key[0] != other[0] or key[2:] != other[2:]:
                continue
            known = [json.loads(group["provenance"].iloc[0]) for group in (table, rows)]
            check_comparable(known, fields=_fields(key[0], about))
            cases = [json.loads(key[1]), json.loads(other[1])]
            check_comparable(cases, fields=sorted({*cases[0], *cases[1]}))
