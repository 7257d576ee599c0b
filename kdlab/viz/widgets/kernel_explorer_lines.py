"""The kernel benchmark as lines to draw: which sizes an op grows with, and the cases that differ in one of them."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kdlab.bench.kernels import case_text, representative_cases, with_other_modes
from kdlab.errors import ArgumentError
from kdlab.viz import theme
from kdlab.viz.kernels import arm_style

_NO_SIZES = {
    "op", "case", "impl", "own", "mode", "us", "p10", "p90", "floor_us", "roofline", "goal_us", "verdict", "warm_us",
    "eager_us",
}  # fmt: skip
_HUES = {
    theme.BLUE: "blue", theme.SKY: "sky", theme.GREEN: "green", theme.ORANGE: "orange", theme.VERMILLION: "vermillion",
    theme.PURPLE: "purple", theme.GREY: "grey",
}  # fmt: skip


class KernelLines:
    """The arms' times of every op, found by op, by the size that grows and by the rest of the case.

    Args:
        table: lines of `kdlab.bench.kernels.kernel_table`, of every mode.

    Attributes:
        table: a line an arm and case, times in a graph where a graph holds the arm, with `warm_us` and `eager_us`.

    Raises:
        ArgumentError: no lines.
    """

    def __init__(self, table: pd.DataFrame) -> None:
        if table.empty:
            raise ArgumentError("table", "lines of kernel_table", "none")
        # A run may have timed a case twice; its first times stand, as one case is one point.
        self.table = with_other_modes(table.drop_duplicates(["op", "case", "impl", "mode"]))
        self._first = representative_cases(self.table).groupby("op", sort=False)["case"].first()
        cases = self.table.drop_duplicates(["op", "case"]).groupby("op", sort=False)
        self._groups = {str(op): _grouped(str(op), lines) for op, lines in cases}

    @property
    def ops(self) -> list[str]:
        """Every op, in the order of the table."""
        return list(self._groups)

    def sizes(self, op: str) -> list[str]:
        """Return the sizes to draw an op over, the one with the longest line first."""
        return list(self._groups[op])

    def cases(self, op: str, x: str) -> list[str]:
        """Return what is left of the op's cases without the size x, each in words."""
        return list(self._groups[op][x])

    def points(self, op: str, x: str, case: str) -> dict[float, str]:
        """Return the values of x of a case, rising, each with the whole case in words."""
        return self._groups[op][x][case]

    def place(self, op: str, x: str, whole_case: str) -> tuple[str, int]:
        """Return the case without x in which a whole case stands, and its number among the case's points."""
        for case, points in self._groups[op][x].items():
            if whole_case in points.values():
                return case, list(points.values()).index(whole_case)
        raise ArgumentError("whole_case", f"a case of {op}", whole_case)

    def first_case(self, op: str) -> str:
        """Return the case that stands for an op in an overview."""
        return str(self._first[op])

    def arms(self, op: str) -> list[dict[str, Any]]:
        """Return name, own, eager, hue and marker of every arm of an op; no two have both hue and marker in common."""
        found: list[dict[str, Any]] = []
        free = list(theme.MARKERS)
        for row in self.table[self.table["op"] == op].drop_duplicates("impl").to_dict("records"):
            style = arm_style(row)
            hue, marker = _HUES[style["color"]], style["marker"]
            if (hue, marker) in {(arm["hue"], arm["marker"]) for arm in found}:
                marker = next(other for other in reversed(free) if other not in {arm["marker"] for arm in found})
            eager = row["mode"] == "eager"
            found.append({
                "name": row["impl"], "own": bool(row["own"]), "eager": eager, "hue": hue, "marker": marker,
            })  # fmt: skip
        return found

    def lines(self, op: str, x: str, case: str) -> pd.DataFrame:
        """Return the lines of a case, of every arm and value of x."""
        whole = set(self.points(op, x, case).values())
        return self.table[(self.table["op"] == op) & self.table["case"].isin(whole)]


def _grouped(op: str, cases: pd.DataFrame) -> dict[str, dict[str, dict[float, str]]]:
    """Size to case without it to value to whole case; a size that only makes single points is left out if one does."""
    found = {}
    for x in (name for name in cases.columns if _grows(cases[name])):
        groups: dict[str, dict[float, str]] = {_without(row, x): {} for row in cases.to_dict("records")}
        for row in cases.sort_values(x, kind="stable").to_dict("records"):
            groups[_without(row, x)][float(row[x])] = row["case"]
        found[x] = groups
    if not found:
        raise ArgumentError("table", f"cases of {op} with a size above 0 in all of them", "none")
    length = {x: max(map(len, groups.values())) for x, groups in found.items()}
    longest = sorted(found, key=lambda x: -length[x])
    return {x: found[x] for x in longest if length[x] > 1} or {longest[0]: found[longest[0]]}


def _grows(column: pd.Series) -> bool:
    """Whether a column holds a size that every case has and that has a place on a logarithmic axis."""
    if column.name in _NO_SIZES:
        return False
    return all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in column)


def _without(row: Mapping[str, Any], x: str) -> str:
    word = case_text({x: row[x]})
    left = f" {row['case']} ".replace(f" {word} ", " ", 1).strip() if word else row["case"]
    return left or "all else as it is"
