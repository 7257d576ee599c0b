"""One round as what is drawn of it: where its nodes stand, what they say, and what a smaller budget leaves of it."""

from dataclasses import dataclass
from math import exp

from kdlab.checks import check_int
from kdlab.decode.records import RoundRecord
from kdlab.model.tokenizer import Tokenizer
from kdlab.viz.layout import tidy_lines


@dataclass(frozen=True)
class RoundDrawing:
    """A round's tree as lists, the bonus as one more node behind the last accepted row.

    Attributes:
        parents, columns, lines: [N + 1] parent row, depth and line of each node; the bonus is the last.
        labels: [N + 1] printable token texts.
        probabilities: [N + 1] the draft's probability of each node's whole path; 0 for the bonus.
        path: accepted rows that the budget holds, the root first.
        num_kept: rows 0..num_kept-1 are in the tree of the budget, the others only in the one that was verified.
        wanted: the node that the target wanted where the walk left the tree: the bonus, or a row beyond the budget.
    """

    parents: list[int]
    columns: list[int]
    lines: list[int]
    labels: list[str]
    probabilities: list[float]
    path: tuple[int, ...]
    num_kept: int
    wanted: int

    @property
    def bonus(self) -> int:
        """The row of the bonus."""
        return len(self.parents) - 1

    @property
    def num_columns(self) -> int:
        """Columns in use."""
        return max(self.columns) + 1

    @property
    def num_lines(self) -> int:
        """Lines in use."""
        return max(self.lines) + 1

    def is_dropped(self, row: int) -> bool:
        """Whether the budget leaves this node out; the bonus goes where the walk ends before it."""
        return row >= self.num_kept and (row != self.bonus or self.wanted != self.bonus)


def arrange(record: RoundRecord, tokenizer: Tokenizer, budget: int | None = None) -> RoundDrawing:
    """Place the nodes of a round.

    Args:
        record: the round.
        tokenizer: gives the token texts, in printable form.
        budget: nodes without the root that are kept; None, or one that is larger than the tree, keeps all.

    Raises:
        ArgumentError: `budget` is no integer or negative.
    """
    tree, last, path = record.tree, record.path[-1], kept_path(record, budget)
    tokens = [*tree.token[0].tolist(), record.bonus]
    parents = [*tree.parent[0].tolist(), last]
    depths = tree.depth[0].tolist()
    likelihood = tree.logp[0].tolist()
    # The bonus stands below the children that the target passed over, or straight on where there are none.
    order = [*(-value for value in likelihood), float("inf")]
    num_rows = len(depths)
    return RoundDrawing(
        parents, [*depths, depths[last] + 1], tidy_lines(parents, order),
        [tokenizer.token_text(int(token)) for token in tokens],
        [*(exp(min(value, 0.0)) for value in likelihood), 0.0], path,
        num_rows if budget is None else min(budget + 1, num_rows),
        record.path[len(path)] if len(path) < len(record.path) else num_rows,
    )  # fmt: skip


def kept_path(record: RoundRecord, budget: int | None) -> tuple[int, ...]:
    """Return the accepted rows that a budget holds: a tree's first rows are the tree of a smaller budget."""
    if budget is None:
        return tuple(record.path)
    budget = check_int("budget", budget, minimum=0)
    return tuple(row for row in record.path if row <= budget)


def outcome(record: RoundRecord, budget: int | None = None) -> str:
    """Say how many of the drafted tokens were accepted, in the tree of a budget if one is given."""
    drafted = int(record.tree.num_nodes[0]) - 1
    drafted = drafted if budget is None else min(budget, drafted)
    accepted = len(kept_path(record, budget)) - 1
    return f"{accepted} of {drafted} accepted + bonus" if drafted else "nothing drafted, the bonus alone"


def round_title(record: RoundRecord, budget: int | None = None) -> str:
    """Say in a line what a round did, or would have done with a smaller budget."""
    less = "" if budget is None or budget >= int(record.tree.num_nodes[0]) - 1 else f", with a budget of {budget}"
    return f"Round {record.round}, position {record.anchor_position}{less}: {outcome(record, budget)}"
