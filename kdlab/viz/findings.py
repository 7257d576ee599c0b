"""What the numbers of a budget sweep say, in sentences made from the numbers."""

import numpy as np
import pandas as pd

from kdlab.errors import ArgumentError
from kdlab.study import BestBudget
from kdlab.study.bootstrap import MIN_PROMPTS
from kdlab.viz.arms import arm_label
from kdlab.viz.wording import best_sentence, percent, prompts_text


def acceptance_findings(summary: pd.DataFrame, budgets: list[int]) -> str:
    """Say what trees accept, and what the best chain accepts, as a Markdown list.

    Args:
        summary: from `kdlab.study.summarize`, one row a (method, setting), trees and chains among them.
        budgets: tree budgets to name, each in the summary.

    Raises:
        ArgumentError: a budget, or every chain, is missing.
    """
    chains = summary[summary["method"] == "chain"]
    if chains.empty:
        raise ArgumentError("summary", "rows of chains", "none")
    chain = chains.loc[chains["tokens_per_round"].idxmax()]
    lines = [f"- The longest rounds of any chain: {_tokens(chain)} ({arm_label('chain', chain['setting'])})."]
    for budget in budgets:
        found = summary[(summary["method"] == "ddtree") & (summary["setting"] == budget)]
        if found.empty:
            raise ArgumentError("budgets", "budgets of the summary", budget)
        tree = found.iloc[0]
        more = percent(tree["tokens_per_round"] / chain["tokens_per_round"] - 1.0)
        lines.append(f"- A tree of budget {budget}: {_tokens(tree)}, {more} against that chain.")
    return "\n".join(lines)


def cost_findings(speed: pd.DataFrame) -> str:
    """Say what the timed rounds cost against a round of AR, as a Markdown list.

    Args:
        speed: from `kdlab.study.speed`; rows whose time was not measured are left out.
    """
    measured = speed[speed["cost_source"] == "measured"].sort_values("rows", kind="stable")
    plain = measured[measured["method"] == "ar"]
    lines = []
    for row in measured[measured["method"].isin(("ar", "chain", "ddtree"))].to_dict("records"):
        line = f"- {arm_label(row['method'], row['setting'])}: {row['round_ms']:.3g} ms a round"
        if len(plain) and row["method"] != "ar":
            line += f", {row['round_ms'] / plain['round_ms'].iloc[0]:.2f} times a round of AR"
        lines.append(line + ".")
    return "\n".join([*lines, *_equal_rows(measured)])


def depth_findings(table: pd.DataFrame) -> str:
    """Say between which shares the acceptance given all smaller depths lies, and whether it falls, in a sentence.

    Args:
        table: from `kdlab.study.acceptance_by_depth`.
    """
    reached = table[table["conditional"].notna()]
    if reached.empty:
        return "No round drafted anything."
    shares = reached.set_index("depth")["conditional"]
    lowest, highest = int(shares.idxmin()), int(shares.idxmax())
    steps = np.diff(shares.to_numpy())
    course = "It falls with every depth" if (steps < 0).all() else "It does not fall with every depth"
    if len(shares) == 1:
        return f"Of all rounds, {100.0 * shares.iloc[0]:.0f} % accepted at depth {lowest}; none went deeper."
    return (
        f"Of the rounds that reach a depth, {100.0 * shares[highest]:.0f} % are accepted there at best "
        f"(depth {highest}) and {100.0 * shares[lowest]:.0f} % at worst (depth {lowest}). {course}; "
        f"each was reached by at least {int(reached['num_reached'].min()):,} rounds."
    )


def speed_findings(best: BestBudget) -> str:
    """Say which budget is best, its margin over the best control, and how far that holds, as Markdown.

    Whether it is a gain is for `kdlab.viz.verdict` to say, which looks at live decodes too.
    """
    lines = [f"**{best_sentence(best).replace(chr(10), ' ')}.**", ""]
    if not np.isnan(best.held_out_margin):
        lines.append(
            "- The margin is measured on the prompts that chose budget and control. Choosing on all prompts but one "
            f"and measuring on that one, each in turn, gives {percent(best.held_out_margin)}."
        )
    if best.num_prompts >= MIN_PROMPTS:
        lines.append(f"- Prompts drawn anew from these name budget {best.budget} again {_times(best.selected_share)}.")
    else:
        lines.append(f"- With {prompts_text(best.num_prompts)}, other prompts may well name another budget.")
    if not np.isnan(best.margin_over_ar):
        lines.append(f"- Against AR: {percent(best.margin_over_ar)}.")
    if best.simulated:
        lines.append("- **Simulated**: one half of this quotient is no measurement.")
    if best.interpolated:
        lines.append("- Some of these round times are interpolated between timed ones.")
    return "\n".join(lines)


def paired_findings(margins: pd.Series, best: BestBudget, control: tuple[str, float]) -> str:
    """Say how the best budget did against a control in whole live decodes, prompt by prompt: no verdict.

    Args:
        margins: of the best budget over the control, tokens per second of one over the other minus 1, one a prompt.
        best: from `kdlab.study.best_budget`, on the same round times.
        control: (method, setting) of the timed control.
    """
    counted = f"Budget {best.budget} was faster than {arm_label(*control)} on {int((margins > 0).sum())} of "
    if len(margins) < MIN_PROMPTS:
        return f"{counted}{prompts_text(len(margins))}: {', '.join(percent(margin) for margin in margins)}."
    return (
        f"{counted}{len(margins)} prompts: median {percent(float(margins.median()))}, "
        f"from {percent(margins.min())} to {percent(margins.max())}."
    )


def _equal_rows(measured: pd.DataFrame) -> list[str]:
    """How far the times of a tree and a chain of equal rows lie apart: what a reader should not take for a result."""
    chains = measured[measured["method"] == "chain"].set_index("rows")["round_ms"]
    trees = measured[measured["method"] == "ddtree"].set_index("rows")["round_ms"]
    return [
        f"- At {rows} rows, a round of the tree takes {percent(trees[rows] / chains[rows] - 1.0)} against a round of "
        "the chain. Both verify the same number of tokens: the difference is the building of the tree, and the scatter "
        "of the times."
        for rows in trees.index.intersection(chains.index)
    ]


def _tokens(row: pd.Series) -> str:
    text = f"{row['tokens_per_round']:.2f} tokens per round"
    if np.isnan(row["tokens_per_round_low"]):
        return f"{text} (no interval from {prompts_text(int(row['num_prompts']))})"
    return f"{text} ({row['tokens_per_round_low']:.2f} to {row['tokens_per_round_high']:.2f})"


def _times(share: float) -> str:
    return "almost always (over 99 %)" if share > 0.99 else f"{100.0 * share:.0f} % of the time"
