"""The tokens of one prompt as they come, and where its output ends."""

from dataclasses import dataclass, field

from kdlab.decode.records import RoundRecord


@dataclass(slots=True, eq=False)
class Transcript:
    """One prompt's tokens and rounds while it is decoded.

    A stop token wins over the cap and may lie inside an accepted path. Rounds count while their anchor comes before the
    cap and before the stop; a round that counts is kept whole, the output is cut.

    Attributes:
        prompt_ids: the prompt.
        cap: most new tokens: max_new_tokens, or less where the context limit comes first.
        capped_by: "length" or "context", what a cut at the cap is called.
        stop_token_ids: tokens that end the output; they are kept in it.
        tail: tokens wanted past the cut.
        tokens: new tokens so far, the first drawn from the prefill.
        rounds: the rounds that count.
        stop: place of the first stop token before the cap among `tokens`.
    """

    prompt_ids: list[int]
    cap: int
    capped_by: str
    stop_token_ids: frozenset[int]
    tail: int = 0
    tokens: list[int] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    stop: int | None = None

    def extend(self, tokens: list[int]) -> None:
        """Append new tokens and note the first stop token before the cap."""
        first = len(self.tokens)
        self.tokens += tokens
        if self.stop is None:
            window = range(first, min(len(self.tokens), self.cap))
            self.stop = next((i for i in window if self.tokens[i] in self.stop_token_ids), None)

    def add_round(self, record: RoundRecord) -> None:
        """Append a round's tokens, and the round itself where it counts."""
        if len(self.tokens) - 1 < self.num_starts:
            self.rounds.append(record)
        self.extend([*record.accepted_tokens, record.bonus])

    @property
    def num_starts(self) -> int:
        """Rounds may start at the new tokens 0..num_starts-1."""
        return self.cap if self.stop is None else self.stop

    @property
    def length(self) -> int:
        """Length of the output once it is known whole."""
        return self.cap if self.stop is None else self.stop + 1

    @property
    def done(self) -> bool:
        """True when no further round counts and the tail is there."""
        return len(self.tokens) - 1 >= self.num_starts and len(self.tokens) >= self.length + self.tail

    @property
    def output_ids(self) -> list[int]:
        """New tokens, cut."""
        return self.tokens[: self.length]

    @property
    def tail_ids(self) -> list[int]:
        """The `tail` tokens past the cut."""
        return self.tokens[self.length : self.length + self.tail]

    @property
    def finish(self) -> str:
        """Why the output ends: "stop", "length" or "context"."""
        return self.capped_by if self.stop is None else "stop"
