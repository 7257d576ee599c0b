"""The kernel explorer: every case of the kernel benchmark in the browser, by op, size and arm, moved by keys."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import pandas as pd
import traitlets
from matplotlib.figure import Figure

from kdlab.errors import ArgumentError
from kdlab.viz.kernels import plot_kernel_growth
from kdlab.viz.theme import caption
from kdlab.viz.widgets.kernel_explorer_lines import KernelLines

_TIMES = ("us", "p10", "p90", "warm_us", "eager_us", "goal_us")


class KernelExplorer(anywidget.AnyWidget):
    """Times of the kernel benchmark against bound, goal and peers: pick an op, a case, what grows, and arms.

    With the focus inside, the left and right arrows move the chosen point, up and down the case, PageUp and PageDown
    the op; `x` takes the next size to draw over, the digits show and hide arms. Arms are shown and hidden in the
    browser alone, without the kernel.

    Args:
        table: lines of `kdlab.bench.kernels.kernel_table`, of every mode.
        launches: kernels that Nsight Compute counted, as `kdlab.profiling.load_nsight` returns them; those of subject
            "kernels" say what a call moves and how busy the matrix units are. None where nothing was counted.
        provenance: adds the line that says on what the times were measured.
        notes: put before the provenance.

    Attributes:
        op: on show.
        x: size that the lines run over.
        case: the other sizes, in words.
        point: number of the chosen value of x.
        arms: names of the arms that are shown.
        view: what the browser draws; made from op, x and case.
        lines: KernelLines, where cases are looked up.

    Raises:
        ArgumentError: no lines.
    """

    _esm = Path(__file__).with_name("kernel_explorer.js")
    _css = Path(__file__).with_name("kernel_explorer.css")
    op = traitlets.Unicode().tag(sync=True)
    x = traitlets.Unicode().tag(sync=True)
    case = traitlets.Unicode().tag(sync=True)
    point = traitlets.Int(0).tag(sync=True)
    arms = traitlets.List(traitlets.Unicode()).tag(sync=True)
    view = traitlets.Dict().tag(sync=True)

    def __init__(
        self, table: pd.DataFrame, launches: pd.DataFrame | None = None, *,
        provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.lines, self._provenance = KernelLines(table), provenance
        self._counted = {} if launches is None else _counted(launches)
        self._notes = (*notes, *(f"launches counted at commit {commit[:9]}" for commit in _commits(launches)))
        op = self.lines.ops[0]
        self._whole_case = self.lines.first_case(op)
        x = self.lines.sizes(op)[0]
        case, point = self.lines.place(op, x, self._whole_case)
        names = [arm["name"] for arm in self.lines.arms(op)]
        super().__init__(op=op, x=x, case=case, point=point, arms=names)
        self._show()

    @property
    def whole_case(self) -> str:
        """The case of the chosen point, as the table names it."""
        return list(self.lines.points(self.op, self.x, self.case).values())[self.point]

    def static(self, *, provenance: Mapping[str, Any] | None = None) -> Figure:
        """Return the static twin: the arms on show over the size on show, as a new figure.

        Args:
            provenance: instead of the explorer's.
        """
        lines = self.lines.lines(self.op, self.x, self.case)
        shown = lines[lines["impl"].isin(self.arms)]
        facts = self._provenance if provenance is None else provenance
        panels = {self.case: shown}
        return plot_kernel_growth(panels, x={self.case: self.x}, title=self.op, provenance=facts, notes=self._notes)

    @traitlets.validate("op", "x", "case")
    def _check_choice(self, proposal: Mapping[str, Any]) -> str:
        name, value = proposal["trait"].name, proposal["value"]
        choices = {
            "op": lambda: self.lines.ops,
            "x": lambda: self.lines.sizes(self.op),
            "case": lambda: self.lines.cases(self.op, self.x),
        }[name]()
        if value not in choices:
            raise traitlets.TraitError(str(ArgumentError(name, "one of " + ", ".join(choices), value)))
        return str(value)

    @traitlets.validate("point")
    def _check_point(self, proposal: Mapping[str, Any]) -> int:
        last = len(self.lines.points(self.op, self.x, self.case)) - 1
        if not 0 <= proposal["value"] <= last:
            raise traitlets.TraitError(str(ArgumentError("point", f"0 to {last}", proposal["value"])))
        return int(proposal["value"])

    @traitlets.validate("arms")
    def _check_arms(self, proposal: Mapping[str, Any]) -> list[str]:
        names = [arm["name"] for arm in self.lines.arms(self.op)]
        unknown = sorted(set(proposal["value"]) - set(names))
        if unknown:
            raise traitlets.TraitError(str(ArgumentError("arms", "some of " + ", ".join(names), unknown)))
        return [name for name in names if name in proposal["value"]]

    @traitlets.observe("op")
    def _change_op(self, change: Mapping[str, Any]) -> None:
        with self.hold_trait_notifications():
            self._whole_case = self.lines.first_case(self.op)
            self.x = self.lines.sizes(self.op)[0]
            self.arms = [arm["name"] for arm in self.lines.arms(self.op)]
            self.case, self.point = self.lines.place(self.op, self.x, self._whole_case)
        self._show()

    @traitlets.observe("x")
    def _change_x(self, change: Mapping[str, Any]) -> None:
        """The chosen point stays, and the lines turn round it."""
        with self.hold_trait_notifications():
            self.case, self.point = self.lines.place(self.op, self.x, self._whole_case)
        self._show()

    @traitlets.observe("case")
    def _change_case(self, change: Mapping[str, Any]) -> None:
        self.point = min(self.point, len(self.lines.points(self.op, self.x, self.case)) - 1)
        self._show()

    @traitlets.observe("point")
    def _change_point(self, change: Mapping[str, Any]) -> None:
        self._whole_case = self.whole_case

    def _show(self) -> None:
        self._whole_case = self.whole_case
        if (self.view.get("op"), self.view.get("x"), self.view.get("case")) != (self.op, self.x, self.case):
            self.view = self._make_view()

    def _make_view(self) -> dict[str, Any]:
        points = self.lines.points(self.op, self.x, self.case)
        times = self.lines.lines(self.op, self.x, self.case).set_index(["impl", "case"])
        floors = times.groupby("case")["floor_us"].first()
        arms = [
            arm | {"points": [self._point(times, arm["name"], whole) for whole in points.values()]}
            for arm in self.lines.arms(self.op)
        ]
        return {
            "op": self.op, "x": self.x, "case": self.case, "ops": self.lines.ops, "sizes": self.lines.sizes(self.op),
            "cases": self.lines.cases(self.op, self.x), "values": list(points), "arms": arms,
            "floors": [_number(floors[whole]) for whole in points.values()],
            "counted": bool(self._counted), "caption": caption(self._provenance, self._notes),
        }  # fmt: skip

    def _point(self, times: pd.DataFrame, arm: str, whole_case: str) -> dict[str, Any] | None:
        """Times of one arm at one case and what was counted there; None where it was not timed."""
        if (arm, whole_case) not in times.index:
            return None
        row = times.loc[(arm, whole_case)]
        found: dict[str, Any] = {name: _number(row[name]) for name in _TIMES}
        found["verdict"] = row["verdict"] if isinstance(row["verdict"], str) else None
        return found | {"counted": self._counted.get((self.op, arm, whole_case))}


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


def _calls(launches: pd.DataFrame) -> pd.DataFrame:
    return launches[(launches["subject"] == "kernels") & (launches["source"] == "ncu")]


def _commits(launches: pd.DataFrame | None) -> list[str]:
    return [] if launches is None else list(_calls(launches)["commit"].dropna().unique())


def _counted(launches: pd.DataFrame) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What a call of (op, arm, case) moved, how busy the matrix units were over its time, and its kernels' names."""
    found = {}
    for (op, name), rows in _calls(launches).groupby(["stage", "case"], sort=False):
        case, _, arm = name.removeprefix(f"{op} ").removesuffix(")").rpartition(" (")
        time = rows["duration_us"]
        tensor = (rows["tensor_pct"] * time).sum(min_count=len(rows)) / time.sum()
        found[op, arm, case] = {
            "dram_bytes": _number((rows["dram_read"] + rows["dram_write"]).sum(min_count=len(rows))),
            "l2_bytes": _number(rows["l2_read"].sum(min_count=len(rows))),
            "tensor_pct": _number(tensor),
            "kernels": list(dict.fromkeys(rows["kernel"])),
        }
    return found
