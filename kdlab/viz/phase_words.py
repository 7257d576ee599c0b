"""What a phase table says, in sentences made from its numbers: the answer, its region, its basis, what turns it."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from kdlab.study.phase import COSTS, OPEN, PAYS, RoundCost
from kdlab.study.step_fit import WHOLE, fit_table
from kdlab.viz.wording import percent, span_text, streams_text

_MOST = 0.9  # of the points: nearly all


def answer(phases: pd.DataFrame) -> str:
    """Say as Markdown whether a tree pays: one line, then a line a comparison.

    Args:
        phases: of `kdlab.study.phase.phase_table`, with its comparisons in the order of `COMPARISONS`.
    """
    alike, best, free = (group for _, group in phases.groupby("comparison", sort=False))
    return "\n".join([
        f"**{_first_line(alike, best, free)}**",
        "",
        f"- Tree and controls of one size each (all that rounds of one shape can run): {_calls_of(alike)}.",
        "- The tree of one size against the best control, which may cut a chain where the draft is unsure: "
        f"{_calls_of(best)}{_where(best)}.",
        f"- A tree that is cut where the draft is unsure too, against the same: {_calls_of(free)}.",
        "",
        "A point is a text, a routing g, a number of streams and a context"
        f"{_left_out(phases)}. A tree pays, or costs, where the whole "
        "interval over prompts is farther from zero than the fitted times are typically off.",
    ])  # fmt: skip


def region_table(phases: pd.DataFrame) -> pd.DataFrame:
    """Return one line a comparison and number of streams: shares of points, gains, and the budgets of best trees."""
    found = []
    order = {name: place for place, name in enumerate(phases["comparison"].unique())}
    groups = phases.groupby([phases["comparison"].map(order), "comparison", "streams"])
    for (_, comparison, streams), group in groups:
        low, middle, high = group["gain"].quantile([0.0, 0.5, 1.0])
        budgets = group.loc[group["call"] == PAYS, "budget"]
        found.append({
            "comparison": comparison,
            "streams": streams,
            **{call: f"{_share(group, call):.0%}" for call in (PAYS, OPEN, COSTS)},
            "lowest gain": percent(low),
            "median": percent(middle),
            "highest": percent(high),
            "budgets, or cuts, that pay": _span(budgets),
        })  # fmt: skip
    return pd.DataFrame(found)


def assumptions(cost: RoundCost, num_prompts: int, level: float = 0.95) -> list[str]:
    """Say what the answer rests on, a sentence each.

    Args:
        cost: of rounds.
        num_prompts: of a kind of text.
        level: of the intervals.
    """
    fit = cost.fit
    if fit.measured:
        table = fit_table(fit).set_index("stage")
        whole = table.loc[WHOLE]
        stage = table.drop(index=WHOLE)["residual_median"].median()
        times = (
            f"Round times are fitted to rounds of one rank's slice, random weights, on one GPU: stages off by "
            f"{stage:.1%} in the median, {int(whole['points'])} whole rounds of up to {fit.most_rows:,.0f} rows of all "
            f"streams by {whole['residual_median']:.1%} in the median and {whole['residual_worst']:.1%} at most, by "
            f"{fit.error:.1%} once they are put right by rounds of other shapes and as many rows, nine of ten of them "
            f"by less than {np.quantile(np.abs(fit.checked), 0.9):.1%}."
        )
    else:
        times = "**No round is recorded**: every stage stands at its floor, which no kernel reaches."
    return [
        "Acceptance is kimi-k26-mini's, block 8, whose drafter and text are not K2.6's; places between its kinds of "
        "text are mixes of two of them, round by round.",
        times,
        f"Intervals are {level:.0%} bootstraps over {num_prompts} prompts a kind. A tree pays, or costs, where the "
        f"whole interval is farther from zero than a fitted round is typically off ({fit.error:.1%}).",
        f"Collectives, {cost.ranks} ranks: {fit.all_reduce.source(cost.ranks)}.",
        f"Experts of a layer that rows touch: E (1 - (1 - k/E)^(S n^g)), experts split by \"{cost.experts}\"; streams "
        "route independently of each other.",
        "Where streams draft different numbers of tokens, a round is taken to verify their mean, packed without "
        "padding: that favours what adapts, adaptive chains among the controls.",
        "A chain costs what a tree of as many rows does; the drafter always runs its whole block; rounds wait for no "
        "host.",
    ]  # fmt: skip


def turning_points(
    phases: pd.DataFrame, what_ifs: Mapping[str, tuple[str, pd.DataFrame]], pairs: pd.DataFrame
) -> list[str]:
    """Say what would change the answer, a sentence each.

    Args:
        phases: as for `answer`.
        what_ifs: the comparison with the best control under other assumptions, by name, with the assumption in words.
        pairs: of `kdlab.study.marks.published_pairs`.
    """
    best = _headline(phases)
    ends = best[best["g"].isin([best["g"].min(), best["g"].max()])]
    routing = ", ".join(f"{_share(group, PAYS):.0%} (g = {g:g})" for g, group in ends.groupby("g"))
    lines = [
        f"**How alike K2.6's rows route.** The tree of one size pays at {routing} of the points; K2.6's g is unknown.",
    ]
    for name, (words, table) in what_ifs.items():
        pays, costs = (f"{_share(table, call):.0%}" for call in (PAYS, COSTS))
        instead = f"pays at {pays} of the points instead of {_share(best, PAYS):.0%}"
        lines.append(
            f"**{name}.** With {words} it {instead}, and costs at {costs} instead of {_share(best, COSTS):.0%}."
        )
    lines.append(
        "**What the drafter's confidence is worth.** A chain can be cut well only where low probabilities mean "
        "rejection, as the mini's do. Where they do not, read the comparison of fixed sizes."
    )
    if len(pairs):
        lines.append(
            f"**Flat draft probabilities.** In the {len(pairs)} published pairs of tree and chain of equal drafted "
            f"tokens ({', '.join(pairs['drafter'].unique())}; second hand) the tree yields "
            f"{span_text(pairs['gain'].min(), pairs['gain'].max())} tokens a round: with such a drafter no tree pays."
        )
    return lines


def marks_table(phases: pd.DataFrame, labels: Mapping[float, str]) -> pd.DataFrame:
    """Return what figures that have a place would gain, a line each: gains from the highest g to the lowest.

    Args:
        phases: of `phase_table` at these places.
        labels: name of each place.
    """
    found = []
    for (work, streams), group in phases.groupby(["work", "streams"], sort=False):
        row = {"figure": labels[work], "chain of 3": f"{work:.2f}", "streams": streams}
        for comparison, one in group.groupby("comparison", sort=False):
            calls = one.sort_values("g")["call"].tolist()
            low, high = one["gain"].min(), one["gain"].max()
            gains = percent(low) if percent(low) == percent(high) else span_text(low, high)
            row[str(comparison)] = f"{gains} ({_calls(calls)})"
        found.append(row)
    return pd.DataFrame(found)


def _calls(calls: list[str]) -> str:
    return calls[0] if len(set(calls)) == 1 else f"{calls[0]} to {calls[-1]} with g"


def _headline(phases: pd.DataFrame) -> pd.DataFrame:
    return phases[phases["comparison"] == phases["comparison"].unique()[1]]


def _share(phases: pd.DataFrame, call: str) -> float:
    return float((phases["call"] == call).mean())


def _first_line(alike: pd.DataFrame, best: pd.DataFrame, free: pd.DataFrame) -> str:
    """Say the three answers in words that need no definition: clearly faster, clearly slower."""
    pays = best[best["call"] == PAYS]
    counts = sorted(pays["streams"].unique())
    where = ""
    if counts:
        where = f" (with {_listed(counts[:-1], streams_text(counts[-1]))}, by up to {percent(pays['gain'].max())})"
    return (
        f"Of {len(alike)} points (text, routing, streams, context) a tree of one size is clearly faster than AR and "
        f"every chain of one length at {_share_text(alike, PAYS)}, clearly slower at {_share_text(alike, COSTS)}. "
        f"Against the best control, which may cut a chain where the draft is unsure, it is faster at "
        f"{_share_text(best, PAYS)}{where}, slower at {_share_text(best, COSTS)}; a tree that is cut so too is faster "
        f"at {_share_text(free, PAYS)}, slower at {_share_text(free, COSTS)}. The rest is too close to call."
    )


def _span(values: pd.Series) -> str:
    """The least and the largest, or the one there is."""
    if values.empty:
        return "-"
    least, most = f"{values.min():g}", f"{values.max():g}"
    return least if least == most else f"{least} to {most}"


def _listed(first: list[int], last: str) -> str:
    """`1, 4 and 8 streams`."""
    return f"{', '.join(map(str, first))} and {last}" if first else last


def _left_out(phases: pd.DataFrame) -> str:
    """Name the streams that have no points at a context, which others of them have."""
    known, found = set(zip(phases["streams"], phases["context"], strict=True)), []
    for context in sorted(phases["context"].unique()):
        counts = [count for count in sorted(phases["streams"].unique()) if (count, context) not in known]
        if counts:
            found.append(f"{_listed(counts[:-1], streams_text(counts[-1]))} at a context of {context:,}")
    return f"; {', or '.join(found)} were never recorded and are none" if found else ""


def _share_text(phases: pd.DataFrame, call: str) -> str:
    share = _share(phases, call)
    return "none" if not share else f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _calls_of(phases: pd.DataFrame) -> str:
    """`pays at 77 % of 945 points, by up to +13 %, costs at 1 of them, down to -5.2 %`."""
    pays, costs = (phases.loc[phases["call"] == call, "gain"] for call in (PAYS, COSTS))
    first = f"pays at {_count(len(pays), len(phases))}" + (f", by up to {percent(pays.max())}" if len(pays) else "")
    first += f" (over all points {percent(phases['gain'].median())} in the median)"
    second = f"costs at {_count(len(costs), len(phases))}" + (f", down to {percent(costs.min())}" if len(costs) else "")
    return f"{first}; {second}"


def _count(part: int, whole: int) -> str:
    share = part / whole
    return (
        "no point" if not part else f"{share:.0%} of {whole} points" if share >= 0.02 else f"{part} of {whole} points"
    )


def _where(phases: pd.DataFrame) -> str:
    """Name the routing at which the tree pays on the hardest and on the easiest text."""
    pays = phases[phases["call"] == PAYS]
    if pays.empty or _share(phases, PAYS) >= _MOST:
        return ""
    most = pays.groupby("work")["g"].max()
    hard, easy = most.index.min(), most.index.max()
    return (
        f". It pays up to g = {most[hard]:g} on the hardest text (chain of 3: {hard:.2f} tokens a round) and up to "
        f"g = {most[easy]:g} on the easiest where it pays at all ({easy:.2f})"
    )
