"""The tree explorer: every round of a run as a tree in the browser, moved by sliders and keys."""

from collections.abc import Mapping
from math import exp, isfinite
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from matplotlib.axes import Axes

from kdlab.decode.records import RoundRecord, Run
from kdlab.errors import ArgumentError
from kdlab.model.token_text import printable
from kdlab.model.tokenizer import Tokenizer
from kdlab.viz.round_drawing import arrange
from kdlab.viz.theme import caption
from kdlab.viz.trees import plot_draft_tree

_TEXT_LIMIT = 2000
"""Characters of the text so far that are sent along, the last ones."""


class TreeExplorer(anywidget.AnyWidget):
    """Every round of a run: prompt and round by slider or key, and what a smaller budget would have left of the tree.

    With the focus inside, the left and right arrows move the round, up and down the budget (with Shift double and
    half), PageUp and PageDown the prompt. The budget is marked in the browser alone, without the kernel.

    Args:
        run: what `generate` returned, with trees whose first rows are the tree of a smaller budget (a chain or a
            best-first tree); prompts without a round are left out.
        tokenizer: gives the token texts.

    Attributes:
        prompt: place of the prompt on show in `prompts`.
        round: the round on show.
        budget: nodes that are kept, the root not counted; the others are grey.
        view: what the browser draws; made from `prompt` and `round`.
        prompts: indices in the run of the prompts that have rounds.

    Raises:
        ArgumentError: no prompt of the run has a round, or a tree is not ordered by its log-probabilities.
    """

    _esm = Path(__file__).with_name("tree_explorer.js")
    _css = Path(__file__).with_name("tree_explorer.css")
    prompt = traitlets.Int(0).tag(sync=True)
    round = traitlets.Int(0).tag(sync=True)
    budget = traitlets.Int(0).tag(sync=True)
    view = traitlets.Dict().tag(sync=True)

    def __init__(self, run: Run, tokenizer: Tokenizer) -> None:
        self.run, self.tokenizer = run, tokenizer
        self.prompts = [index for index, rounds in enumerate(run.rounds) if rounds]
        if not self.prompts:
            raise ArgumentError("run", "at least one round", "none")
        records = [record for rounds in run.rounds for record in rounds]
        if any((record.tree.logp[0].diff() > 0).any() for record in records):
            raise ArgumentError("run", "trees whose rows fall in log-probability: chains, best-first trees", "others")
        self._largest = max(int(record.tree.num_nodes[0]) - 1 for record in records)
        self._labels = [self._label(index) for index in self.prompts]
        super().__init__(budget=self._largest)
        self._show()

    @property
    def record(self) -> RoundRecord:
        """The round on show."""
        return self.run.rounds[self.prompts[self.prompt]][self.round]

    def static(self, ax: Axes | None = None, *, provenance: Mapping[str, Any] | None = None) -> Axes:
        """Return the static twin: the round on show, drawn at the budget on show.

        Args:
            ax: where to draw; a new figure when None.
            provenance: adds the line that says on what the round was decoded; None takes the run's.
        """
        facts = self.run.provenance if provenance is None else provenance
        return plot_draft_tree(self.record, self.tokenizer, ax, budget=self.budget, provenance=facts)

    @traitlets.validate("prompt", "round", "budget")
    def _check_place(self, proposal: Mapping[str, Any]) -> int:
        name, value = proposal["trait"].name, proposal["value"]
        last = {
            "prompt": len(self.prompts) - 1,
            "round": len(self.run.rounds[self.prompts[self.prompt]]) - 1,
            "budget": self._largest,
        }[name]
        if not 0 <= value <= last:
            raise traitlets.TraitError(str(ArgumentError(name, f"0 to {last}", value)))
        return value

    @traitlets.observe("prompt")
    def _change_prompt(self, change: Mapping[str, Any]) -> None:
        self.round = 0
        self._show()

    @traitlets.observe("round")
    def _show(self, change: Mapping[str, Any] | None = None) -> None:
        if (self.view.get("prompt"), self.view.get("round")) != (self.prompt, self.round):
            self.view = self._make_view()

    def _make_view(self) -> dict[str, Any]:
        record, index = self.record, self.prompts[self.prompt]
        rounds, drawing = self.run.rounds[index], arrange(record, self.tokenizer)
        output = self.run.output_ids[index][: sum(other.num_tokens for other in rounds[: self.round])]
        before = self.tokenizer.decode([*self.run.prompt_ids[index], *output])
        tokens = [int(record.tree.token[0, 0]), *record.accepted_tokens, record.bonus]
        places = zip(drawing.parents, drawing.columns, drawing.lines, drawing.labels, strict=True)
        nodes = [{"parent": parent, "x": x, "y": y, "text": text} for parent, x, y, text in places]
        for node, facts in zip(nodes, self._node_facts(record), strict=True):
            node |= facts
        return {
            "prompt": self.prompt, "round": self.round, "prompts": self._labels, "rounds": len(rounds),
            "largest": self._largest, "position": record.anchor_position, "path": list(record.path), "nodes": nodes,
            "before": before[-_TEXT_LIMIT:], "spoken": [self._spoken(token) for token in tokens],
            "caption": caption(self.run.provenance),
        }  # fmt: skip

    def _node_facts(self, record: RoundRecord) -> list[dict[str, Any]]:
        """Rank, probabilities and the target's answer of each row, and of the bonus that there is nothing of it."""
        tree, text = record.tree, self.tokenizer.token_text
        logp, parents, ranks = tree.logp[0].tolist(), tree.parent[0].tolist(), tree.rank[0].tolist()
        facts = []
        for row, (value, parent, rank) in enumerate(zip(logp, parents, ranks, strict=True)):
            answer = int(record.target_tokens[row])
            facts.append({
                "rank": rank, "logp": value if isfinite(value) else -1e9, "path": exp(min(value, 0.0)),
                "own": exp(min(value - logp[parent], 0.0)) if row and isfinite(value) else float(row == 0),
                "wants": text(answer) if answer >= 0 else "nothing: its logits were not finite",
            })  # fmt: skip
        return [*facts, {"rank": 0, "logp": 0.0, "path": 0.0, "own": 0.0, "wants": ""}]

    def _spoken(self, token: int) -> str:
        """A token as it stands in the text; in printable form where it is only a piece of a character."""
        text = self.tokenizer.decode([token])
        return text if text and "\ufffd" not in text else self.tokenizer.token_text(token)

    def _label(self, index: int) -> str:
        text = printable(self.tokenizer.decode(self.run.prompt_ids[index]).strip()).replace("␣", " ")
        return f"{self.run.prompts[index].id}: {text if len(text) <= 40 else text[:39] + '…'}"
