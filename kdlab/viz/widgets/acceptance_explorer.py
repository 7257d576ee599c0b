"""The acceptance explorer: one recording, five figures of it, at any budget and for any kind of text."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from typing import Any

import ipywidgets
from matplotlib.axes import Axes

from kdlab.decode.field import DraftField
from kdlab.errors import ArgumentError
from kdlab.study import (
    acceptance_after_sibling,
    acceptance_by_depth,
    acceptance_by_rank,
    calibration,
    missed_mass,
)
from kdlab.tree import MAX_BUDGET
from kdlab.viz import acceptance
from kdlab.viz.siblings import plot_after_sibling
from kdlab.viz.widgets.figure_image import FigureImage

_EVERY_KIND = "every kind"
_Plot = Callable[..., Axes]
# Figure to what computes it from (field, budget) and what draws it.
_VIEWS: dict[str, tuple[Callable[[DraftField, int], Any], _Plot, str]] = {
    "by depth": (acceptance_by_depth, acceptance.plot_acceptance_by_depth, "Acceptance by depth"),
    "by rank": (acceptance_by_rank, acceptance.plot_rank_heatmap, "Which candidate is the target's token?"),
    "after a sibling": (acceptance_after_sibling, plot_after_sibling, "Does the draft hold off its own best path?"),
    "calibration": (
        lambda field, budget: calibration(field, max_rank=1, given_budget=budget),
        acceptance.plot_calibration, "Do the draft's probabilities mean what they say?",
    ),
    "missed mass": (lambda field, budget: missed_mass(field), acceptance.plot_missed_mass, "What the top K leaves out"),
}  # fmt: skip


class AcceptanceExplorer(ipywidgets.VBox):
    """Where a recording's acceptance comes from: a figure, a budget and a kind of text, drawn in place.

    Args:
        field: what `record` returned.
        budget: the one shown first.
        largest: the slider's end; None takes the recorded candidates a position, above which a tree is not exact.

    Attributes:
        figure: ToggleButtons whose value names the figure.
        budget: IntSlider; a figure is drawn when it is let go, and each arrow key moves it by one.
        kind: Dropdown of the kinds of text.
        drawing: FigureImage on show.
        words: HTML, what the figure counts.

    Raises:
        ArgumentError: the recording has no prompt, or a number is out of range.
    """

    def __init__(self, field: DraftField, budget: int = 15, *, largest: int | None = None) -> None:
        if not field.prompts:
            raise ArgumentError("field", "at least one prompt", "none")
        self.field = field
        end = min(field.top_k if largest is None else largest, MAX_BUDGET)
        if not 0 <= budget <= end:
            raise ArgumentError("budget", f"0 to {end}", budget)
        kinds = [_EVERY_KIND, *dict.fromkeys(prompt.kind for prompt in field.prompts)]
        self._tables: dict[tuple[str, str, int], Any] = {}
        self.figure = ipywidgets.ToggleButtons(options=list(_VIEWS), style={"button_width": "auto"})
        self.budget = ipywidgets.IntSlider(budget, 0, end, description="Budget", continuous_update=False)
        self.kind = ipywidgets.Dropdown(options=kinds, description="Text")
        self.drawing, self.words = FigureImage(), ipywidgets.HTML()
        super().__init__([self.figure, ipywidgets.HBox([self.budget, self.kind]), self.drawing, self.words])
        for control in (self.figure, self.budget, self.kind):
            control.observe(self._show, names="value")
        self._show()

    def table(self) -> Any:
        """Return the numbers of the figure on show, as the study's function gives them."""
        key = (self.figure.value, self.kind.value, self.budget.value)
        if key not in self._tables:
            chosen = [prompt for prompt in self.field.prompts if key[1] in (_EVERY_KIND, prompt.kind)]
            self._tables[key] = _VIEWS[key[0]][0](replace(self.field, prompts=chosen), key[2])
        return self._tables[key]

    def static(self, ax: Axes | None = None, *, provenance: Mapping[str, Any] | None = None) -> Axes:
        """Return the static twin: the figure on show.

        Args:
            ax: where to draw; a new figure when None.
            provenance: adds the line that says on what it was recorded; None takes the field's.
        """
        facts = self.field.provenance if provenance is None else provenance
        return _VIEWS[self.figure.value][1](self.table(), ax, title=self._title(), provenance=facts)

    def _title(self) -> str:
        kind = "" if self.kind.value == _EVERY_KIND else f", {self.kind.value}"
        size = f"K = {self.field.top_k}" if self.figure.value == "missed mass" else f"budget {self.budget.value}"
        return f"{_VIEWS[self.figure.value][2]} ({size}{kind})"

    def _show(self, change: Mapping[str, Any] | None = None) -> None:
        self.drawing.show(self.static(), self._title())
        prompts = [prompt for prompt in self.field.prompts if self.kind.value in (_EVERY_KIND, prompt.kind)]
        positions = sum(prompt.num_starts for prompt in prompts)
        words = f"{self._title()}: {len(prompts)} prompts, {positions:,} positions."
        self.words.value = f"<p>{escape(words)}</p>"
