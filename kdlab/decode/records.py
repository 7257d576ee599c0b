"""What a decode leaves behind: one RoundRecord a round a stream, and the Run that holds them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kdlab.model.prompts import Prompt
from kdlab.tree.draft_tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class RoundRecord:
    """One verified draft tree of one stream.

    Attributes:
        prompt: index of the prompt in the list that was decoded.
        round: index of the round of this prompt, 0 first.
        anchor_position: absolute position of the root, which is the number of committed rows before the round.
        tree: DraftTree of one stream with exactly N = num_nodes rows, the anchor as token of row 0.
        target_tokens: [N] int32, the target's own token after each row; -1 where its logits held NaN.
        path: accepted rows, the root first.
        bonus: the target's token after the last accepted row, the next round's anchor.
        expert_ids: [moe layers, N, k] int16, the experts each row used, or None when not asked for.
        nonfinite_draft_rows: draft positions whose logits were not finite; the tree ends before the first of them.
    """

    prompt: int
    round: int
    anchor_position: int
    tree: DraftTree
    target_tokens: np.ndarray
    path: tuple[int, ...]
    bonus: int
    expert_ids: np.ndarray | None = None
    nonfinite_draft_rows: int = 0

    def __repr__(self) -> str:
        where = f"prompt={self.prompt}, round={self.round}, anchor_position={self.anchor_position}"
        return f"RoundRecord({where}, num_nodes={len(self.target_tokens)}, num_tokens={self.num_tokens})"

    @property
    def num_tokens(self) -> int:
        """Tokens of this round: accepted draft tokens plus the bonus."""
        return len(self.path)

    @property
    def accepted_tokens(self) -> tuple[int, ...]:
        """Draft tokens on the accepted path, without the root and without the bonus."""
        return tuple(int(self.tree.token[0, row]) for row in self.path[1:])


@dataclass(frozen=True, eq=False)
class Run:
    """Everything `kdlab.generate` returns; lists hold one entry a prompt.

    Attributes:
        prompts: the prompts, in order.
        prompt_ids: their token ids.
        output_ids: new tokens, cut at the stop token (which is kept) or at the cap.
        text: `output_ids` decoded.
        rounds: whole rounds that started before the cap and before a stop token.
        finish: "stop", "length" (max_new_tokens) or "context" (the target's context limit).
        provenance: where, when and with what settings and bytes the run was made.
    """

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    output_ids: list[list[int]]
    text: list[str]
    rounds: list[list[RoundRecord]]
    finish: list[str]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        lengths = [length for lengths in self.round_lengths for length in lengths]
        rate = f"{np.mean(lengths):.3f}" if lengths else "nan"
        setting = f"method={self.provenance.get('method')!r}, budget={self.provenance.get('budget')}"
        counts = f"num_prompts={len(self.prompts)}, num_tokens={sum(map(len, self.output_ids))}"
        return f"Run({setting}, {counts}, num_rounds={len(lengths)}, tokens_per_round={rate})"

    @property
    def round_lengths(self) -> list[list[int]]:
        """Tokens of every round (accepted draft tokens + 1), a list a prompt."""
        return [[record.num_tokens for record in rounds] for rounds in self.rounds]

    @property
    def tokens_per_round(self) -> list[float]:
        """Mean tokens per round of each prompt; NaN for a prompt without a round."""
        return [float(np.mean(lengths)) if lengths else float("nan") for lengths in self.round_lengths]
