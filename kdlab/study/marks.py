"""Figures of others on a line of workloads: where the line's own arm yields as many tokens a round."""

import numpy as np
import pandas as pd

from kdlab.decode.field import DraftField
from kdlab.study.traces.rounds import RoundTrace
from kdlab.study.traces.table import trace_summary
from kdlab.study.workloads import Line


def published_marks(published: pd.DataFrame, line: Line) -> pd.DataFrame:
    """Place published chains on a line.

    A tree has no place: the trees that were published are not best-first trees of a DFlash drafter. Nor has a chain
    longer than the line's drafter drafts, or one whose figure lies beyond the line's ends.

    Args:
        published: of `kdlab.study.published_acceptance`.
        line: of workloads.

    Returns:
        `published` with the column place (NaN: none).
    """
    is_chain = published["method"] == "chain"
    places = [line.place_of(("chain", float(drafted)), tokens) if chain else np.nan for chain, drafted, tokens in
              zip(is_chain, published["drafted"], published["tokens_per_round"], strict=True)]  # fmt: skip
    return published.assign(place=places)


def published_pairs(published: pd.DataFrame) -> pd.DataFrame:
    """Return published trees beside chains of as many drafted tokens, same models and workload.

    Args:
        published: of `kdlab.study.published_acceptance`.

    Returns:
        target, drafter, workload, drafted, chain, tree (tokens per round) and gain, the tree's over the chain.
    """
    keys = ["target", "drafter", "workload", "drafted"]
    wide = published.pivot_table(index=keys, columns="method", values="tokens_per_round", sort=False)
    if "tree" not in wide or "chain" not in wide:
        return pd.DataFrame(columns=[*keys, "chain", "tree", "gain"])
    both = wide.dropna(subset=["chain", "tree"]).reset_index().rename_axis(columns=None)
    return both.assign(gain=both["tree"] / both["chain"] - 1.0)[[*keys, "chain", "tree", "gain"]]


def trace_mark(trace: RoundTrace | DraftField, line: Line) -> float:
    """Return the place of a trace on a line, NaN where it has none: by its own arm, or by its field's axis arm."""
    summary = trace_summary(trace).set_index(["method", "setting"])["tokens_per_round"]
    arm = line.arm if isinstance(trace, DraftField) else (trace.method, float(trace.budget))
    return line.place_of(arm, float(summary[arm])) if arm in summary.index else float("nan")
