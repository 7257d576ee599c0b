"""What the numbers of a budget sweep say, in sentences made from the numbers."""

from typing import Any

import numpy as np
import pandas as pd

from kdlab.errors import ArgumentError
from kdlab.study import BestBudget
from kdlab.viz.arms import arm_label
from kdlab.viz.sweep import best_sentence, percent


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


def kind_findings(gains: pd.DataFrame, texts: pd.DataFrame) -> str:
    """Say for each kind of text where trees are ahead of the best chain, and by how much, as a Markdown list.

    Args:
        gains: from `kdlab.study.gain_by_kind`.
        texts: from `kdlab.study.repetition`, a row a kind of `gains`.
    """
    repeated = texts.set_index("kind")
    lines = []
    for kind, rows in gains.groupby("kind", sort=False):
        ordered = rows.sort_values("budget").to_dict("records")
        chain = f"{ordered[0]['chain_tokens_per_round']:.2f} tokens per round (length {ordered[0]['chain']})"
        line = f"- **{kind}**: the best chain has {chain}; {_ahead(ordered)}."
        if repeated.loc[kind, "loop"]:
            line += f" **A loop**: it repeats {repeated.loc[kind, 'repeated']:.0%} of its 8-grams."
        lines.append(line)
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


def speed_findings(best: BestBudget) -> str:
    """Say which budget is best, by how much over the best control, and how far that holds, as Markdown."""
    headline, certainty = best_sentence(best).split("\n")
    lines = [
        f"**{headline}.** {certainty}",
        "- Budget and control were chosen on the prompts that the margin is computed on, so it leans upwards: where "
        "both are chosen on all prompts but one and measured on that one, the margin is "
        f"{_known(best.held_out_margin)}.",
        f"- Another draw of these prompts names the same budget in {100.0 * best.selected_share:.0f} % of cases.",
        f"- Against AR: {_known(best.margin_over_ar)}.",
    ]
    if best.simulated:
        lines.append("- **Simulated**: one half of this quotient is no measurement.")
    if best.interpolated:
        lines.append("- Some round times of controls were interpolated between timed chains.")
    return "\n".join([lines[0], "", *lines[1:]])


def paired_findings(margins: pd.Series, best: BestBudget, control: tuple[str, float]) -> str:
    """Say what whole live decodes of the same prompts say of the best budget, and whether the quotient agrees.

    Args:
        margins: of the best budget over the control, tokens per second of one over the other minus 1, one a prompt.
        best: from `kdlab.study.best_budget`, on the same round times.
        control: (method, setting) of the timed control.
    """
    middle, agrees = float(margins.median()), (margins.median() > 0) == (best.margin > 0)
    verdict = (
        "The quotient has the same sign."
        if agrees
        else "**The quotient has the other sign: the difference is smaller than these times can tell.**"
    )
    return (
        f"Budget {best.budget} was faster than {arm_label(*control)} on {int((margins > 0).sum())} of {len(margins)} "
        f"prompts; the middle prompt gained {percent(middle)}, the worst {percent(margins.min())}, "
        f"the best {percent(margins.max())}. {verdict}"
    )


def _ahead(ordered: list[dict[str, Any]]) -> str:
    """Where the trees of one kind, by rising budget, pass its best chain, and the gain of the largest."""
    largest = ordered[-1]
    gain = percent(largest["gain"])
    if not np.isnan(largest["gain_low"]):
        gain += f" ({percent(largest['gain_low'])} to {percent(largest['gain_high'])})"
    lowest = [row["gain"] if np.isnan(row["gain_low"]) else row["gain_low"] for row in ordered]
    passed = [row["budget"] for row, low in zip(ordered, lowest, strict=True) if low > 0]
    where = f"trees are ahead from budget {passed[0]} on" if passed else "no tree is clearly ahead"
    return f"{where}, {gain} at {largest['budget']}"


def _equal_rows(measured: pd.DataFrame) -> list[str]:
    """How far the times of a tree and a chain of equal rows lie apart: what a reader should not take for a result."""
    chains = measured[measured["method"] == "chain"].set_index("rows")["round_ms"]
    trees = measured[measured["method"] == "ddtree"].set_index("rows")["round_ms"]
    return [
        f"- At {rows} rows the tree takes {percent(trees[rows] / chains[rows] - 1.0)} against the chain. Apart from "
        "building the tree both do the same work, so the rest of that difference is noise, which no interval holds."
        for rows in trees.index.intersection(chains.index)
    ]


def _tokens(row: pd.Series) -> str:
    text = f"{row['tokens_per_round']:.2f} tokens per round"
    if np.isnan(row["tokens_per_round_low"]):
        return f"{text} (no interval from {row['num_prompts']} prompts)"
    return f"{text} ({row['tokens_per_round_low']:.2f} to {row['tokens_per_round_high']:.2f})"


def _known(share: float) -> str:
    return "not known" if np.isnan(share) else percent(share)
