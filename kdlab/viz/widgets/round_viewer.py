"""The round viewer: a prompt menu and a round slider over one drawing, which a notebook updates in place."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from kdlab.decode.records import RoundRecord, Run
from kdlab.errors import ArgumentError
from kdlab.model.token_text import printable
from kdlab.model.tokenizer import Tokenizer
from kdlab.viz.theme import png_bytes
from kdlab.viz.trees import plot_draft_tree, plot_rounds, round_title

_DPI = 110


class RoundViewer(ipywidgets.VBox):
    """Every round of a run, one at a time; a focused slider moves a round with each arrow key.

    Args:
        run: what `generate` returned; prompts without a round are left out of the menu.
        tokenizer: gives the token texts.

    Attributes:
        prompt: Dropdown whose value is the index of the prompt shown.
        round: IntSlider whose value is the round shown.
        drawing: Image, the PNG of that round.
        words: HTML, the same round in words.

    Raises:
        ArgumentError: no prompt of the run has a round.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer) -> None:
        self.run, self.tokenizer = run, tokenizer
        choices = [(self._prompt_label(index), index) for index, rounds in enumerate(run.rounds) if rounds]
        if not choices:
            raise ArgumentError("run", "at least one round", "none")
        wide = ipywidgets.Layout(width="32em")
        self.prompt = ipywidgets.Dropdown(options=choices, description="Prompt", layout=wide)
        last = len(run.rounds[choices[0][1]]) - 1
        self.round = ipywidgets.IntSlider(0, 0, last, description="Round", layout=wide)
        self.drawing = ipywidgets.Image(format="png", layout=ipywidgets.Layout(max_width="100%", object_fit="contain"))
        self.words = ipywidgets.HTML()
        super().__init__([ipywidgets.HBox([self.prompt, self.round]), self.drawing, self.words])
        self.prompt.observe(self._change_prompt, names="value")
        self.round.observe(self._show, names="value")
        self._show()

    @property
    def record(self) -> RoundRecord:
        """The round on show."""
        return self.run.rounds[self.prompt.value][self.round.value]

    def static(
        self, rounds: Sequence[int] | None = None, *, prompt: int | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Figure:  # fmt: skip
        """Return the static twin: chosen rounds of one prompt as small multiples on a new figure.

        Args:
            rounds: indices of the rounds; None takes all.
            prompt: index of the prompt; None takes the one on show.
            provenance: adds the line that says on what the rounds were decoded.
        """
        records = self.run.rounds[self.prompt.value if prompt is None else prompt]
        chosen = records if rounds is None else [records[index] for index in rounds]
        return plot_rounds(chosen, self.tokenizer, provenance=provenance)

    def _prompt_label(self, index: int) -> str:
        text = printable(self.tokenizer.decode(self.run.prompt_ids[index]).strip()).replace("␣", " ")
        return f"{self.run.prompts[index].id}: {text if len(text) <= 40 else text[:39] + '…'}"

    def _change_prompt(self, change: Mapping[str, Any]) -> None:
        was = self.round.value
        # The slider falls back to its new maximum by itself, and that already redraws; an equal value does not.
        self.round.max = len(self.run.rounds[change["new"]]) - 1
        self.round.value = 0
        if was == 0:
            self._show()

    def _show(self, change: Mapping[str, Any] | None = None) -> None:
        self.drawing.value = png_bytes(plot_draft_tree(self.record, self.tokenizer), _DPI)
        self.words.value = f"<p>{escape(self._sentence())}</p>"

    def _sentence(self) -> str:
        record, text = self.record, self.tokenizer.token_text
        accepted = " ".join(text(token) for token in record.accepted_tokens) or "nothing"
        return f"{round_title(record)}. Accepted: {accepted}. The target's own next token: {text(record.bonus)}"
