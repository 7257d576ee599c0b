"""How a decoding method is named and marked, the same in every figure and sentence."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from kdlab.errors import ArgumentError
from kdlab.viz import theme


@dataclass(frozen=True, slots=True)
class ArmStyle:
    """Name, colour, marker and line of one method."""

    name: str
    colour: str
    marker: str
    line: str
    meaning: str = ""

    @property
    def legend(self) -> str:
        """The name, and what it means where the name does not say it."""
        return f"{self.name}: {self.meaning}" if self.meaning else self.name


STYLES = {
    "ddtree": ArmStyle("DDTree", theme.BLUE, "o", "-"),
    "chain": ArmStyle("chain", theme.VERMILLION, "s", "-"),
    "adaptive_chain": ArmStyle("adaptive chain", theme.ORANGE, "D", "-",
                               "chain cut where\nthe draft is unsure (p < t)"),
    "beam": ArmStyle("beam", theme.PURPLE, "^", "-."),
    "tree": ArmStyle("another tree", theme.GREEN, "P", "-"),
    "ar": ArmStyle("AR", theme.BLACK, "X", "none"),
}


_HOLLOW = (
    ("truncated", True, "hollow: budget above the recorded top K"),
    ("cost_source", "interpolated", "dashed: round time interpolated"),
)


def arm_style(method: str) -> ArmStyle:
    """Return how `method` is drawn.

    Raises:
        ArgumentError: no such method.
    """
    if method not in STYLES:
        raise ArgumentError("method", "one of " + ", ".join(STYLES), repr(method))
    return STYLES[method]


def arm_label(method: str, setting: float) -> str:
    """Name one arm: its method and what its setting means."""
    name = arm_style(method).name
    if method == "ar":
        return name
    meanings = {"chain": "length", "adaptive_chain": "cut at p <", "beam": "width"}  # of both trees their budget
    return f"{name}, {meanings.get(method, 'budget')} {setting:g}"


def mark_flags(ax: Axes, table: pd.DataFrame) -> None:
    """Say on the chart that its points are simulated, and in the legend (drawn after this) what hollow points are."""
    for column, value, label in _HOLLOW:
        if column in table and (table[column] == value).any():
            line = "--" if column == "cost_source" else "none"
            ax.plot([], [], linestyle=line, marker="o", markerfacecolor="white", color=theme.GREY, label=label)
    if "simulated" in table and table["simulated"].any():
        ax.text(0.5, 0.5, "SIMULATED\nno measurement", transform=ax.transAxes, ha="center", va="center", zorder=9,
                fontsize=2 * theme.TITLE_PT, color=theme.VERMILLION, alpha=0.45, weight="bold",
                rotation=20)  # fmt: skip


def is_hollow(table: pd.DataFrame) -> pd.Series:
    """True at the rows that are drawn hollow."""
    hollow = pd.Series(False, index=table.index)
    for column, value, _ in _HOLLOW:
        if column in table:
            hollow |= table[column] == value
    return hollow
