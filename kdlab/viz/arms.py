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


STYLES = {
    "ddtree": ArmStyle("DDTree", theme.BLUE, "o", "-"),
    "chain": ArmStyle("chain", theme.VERMILLION, "s", "-"),
    "adaptive_chain": ArmStyle("adaptive chain", theme.ORANGE, "D", "--"),
    "beam": ArmStyle("beam", theme.PURPLE, "^", "-."),
    "ar": ArmStyle("AR", theme.BLACK, "X", "none"),
}


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
    meaning = {"ddtree": "budget", "chain": "length", "adaptive_chain": "cut", "beam": "width"}[method]
    return f"{name}, {meaning} {setting:g}"


def mark_flags(ax: Axes, table: pd.DataFrame) -> None:
    """Say on the chart itself that points are simulated, or of a decoder that keeps only the recorded top K."""
    lines = []
    if "simulated" in table and table["simulated"].any():
        lines.append("SIMULATED: no measurement")
    if "truncated" in table and table["truncated"].any():
        lines.append("hollow: budget above the recorded top K")
    if "cost_source" in table and (table["cost_source"] == "interpolated").any():
        lines.append("hollow: round time interpolated")
    if lines:
        ax.text(0.98, 0.03, "\n".join(lines), transform=ax.transAxes, ha="right", va="bottom", fontsize=theme.TICK_PT,
                color=theme.VERMILLION, weight="bold", zorder=9,
                bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5})  # fmt: skip
