"""`python -m kdlab.report.cost_page`: writes whether a tree pays on Kimi K2.6 into the marked places of the pages.

What stands there comes from the recorded rounds and the recorded acceptance. `make cost` runs notebook 50 first, whose
figures the pages show.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import pandas as pd

from kdlab.bench.full_width.evidence import TEMPERATURE, Evidence, load_evidence
from kdlab.paths import REPOSITORY
from kdlab.report.marked_places import fill_places, markdown_table, write_pages
from kdlab.study.gpus import GPUS, carried_over
from kdlab.study.marks import published_pairs
from kdlab.study.phase import RoundCost
from kdlab.study.published import published_acceptance
from kdlab.viz.phase_words import answer, assumptions, region_table, turning_points

PAGES = tuple(REPOSITORY / name for name in ("README.md", "docs/ideas-cost.md"))
_SHOWN_ROWS, _SHOWN_STREAMS, _SHOWN_CONTEXT, _SHOWN_G = (1, 8, 16, 32, 64), (1, 8, 32), 8192, 0.8


@dataclass
class CostPage:
    """Evidence, and the region of the answer, computed once for all places."""

    evidence: Evidence

    @cached_property
    def phases(self) -> pd.DataFrame:
        """Of `Evidence.phases`."""
        return self.evidence.phases()

    @cached_property
    def what_ifs(self) -> dict[str, tuple[str, pd.DataFrame]]:
        """Of `Evidence.what_ifs`."""
        return self.evidence.what_ifs()

    def fill(self, text: str) -> str:
        """Return a page's text with every marked place written anew.

        Raises:
            ArgumentError: a place has an unknown name.
        """
        return fill_places(text, "cost", {name: partial(make, self) for name, make in _MAKERS.items()})


def _source(page: CostPage) -> str:
    known = page.evidence.provenance
    if not known:
        return "**No round is recorded yet**: every stage stands at its floor, which no kernel reaches."
    gpu, day, commit = known["gpu"], known["started_utc"][:10], known["git_commit"][:7]
    cost, g = page.evidence.cost, page.phases["g"]
    return (
        f"Rounds: one {gpu}, {day}, commit {commit}, one rank of {cost.ranks}, random weights. Collectives: "
        f"{cost.fit.all_reduce.source(cost.ranks)}. Acceptance: kimi-k26-mini at temperature {TEMPERATURE:g}, not "
        f"K2.6's. Routing: K2.6's g is unknown, {g.min():g} to {g.max():g} here."
    )


def _verdict(page: CostPage) -> str:
    return f"{answer(page.phases).splitlines()[0]} {_source(page)}"


def _answer(page: CostPage) -> str:
    return f"{answer(page.phases)}\n\n{_source(page)}"


def _region(page: CostPage) -> str:
    return _markdown(region_table(page.phases))


def _basis(page: CostPage) -> str:
    return "\n".join(f"- {line}" for line in assumptions(page.evidence.cost, page.evidence.num_prompts))


def _turns(page: CostPage) -> str:
    pairs = published_pairs(published_acceptance())
    return "\n".join(f"- {line}" for line in turning_points(page.phases, page.what_ifs, pairs))


def _rounds(page: CostPage) -> str:
    cost, rows = page.evidence.cost, []
    for count in _SHOWN_STREAMS:
        row = {"streams": str(count)}
        for n in _SHOWN_ROWS:
            us = cost.us(n, drafts=n > 1, g=_SHOWN_G, streams=count, context=_SHOWN_CONTEXT)
            row["AR" if n == 1 else f"{n} rows"] = f"{us / 1e3:.1f}"
        rows.append(row)
    words = "fitted" if cost.fit.measured else "every stage at its floor"
    return (
        f"Milliseconds of a round, {words}, collectives included: {cost.ranks} ranks, g = {_SHOWN_G:g}, context "
        f"{_SHOWN_CONTEXT:,}.\n\n{_markdown(pd.DataFrame(rows))}"
    )


def _fit(page: CostPage) -> str:
    if page.evidence.points is None:
        return "No round is recorded yet, so there is no fit to show."
    words = "Recorded times of stages and whole rounds against their fit, and what the fit is off by"
    command = "kdlab run notebooks/50_experts_and_cost.ipynb"
    return f"![{words}](pictures/50_fit.png)\n\n*Collectives are in the hollow stars alone. Made by `{command}`.*"


def _predictions(page: CostPage) -> str:
    cost, rows = page.evidence.cost, []
    for name in GPUS:
        gpu = cost.gpu if name == "H200" else carried_over(name)
        one = RoundCost(cost.fit, cost.target, cost.drafter, cost.ranks, cost.experts, gpu)
        times = [one.us(n, drafts=n > 1, g=_SHOWN_G, streams=1, context=_SHOWN_CONTEXT) / 1e3 for n in (1, 8, 32)]
        kind = "predicted" if gpu.predicted or not cost.fit.measured else "fitted"
        rows.append(
            {
                "8 x": name,
                "": kind,
                **{"AR, ms" if n == 1 else f"{n} rows": f"{ms:.1f}" for n, ms in zip((1, 8, 32), times, strict=True)},
            }
        )
    return _markdown(pd.DataFrame(rows))


def _markdown(table: pd.DataFrame) -> str:
    return markdown_table(table.columns.tolist(), table.astype(str).to_numpy().tolist())


_MAKERS: dict[str, Callable[[CostPage], str]] = {
    "verdict": _verdict, "answer": _answer, "region": _region, "basis": _basis, "turns": _turns, "rounds": _rounds,
    "fit": _fit, "predictions": _predictions,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages; returns 0."""
    text = "Write whether a tree pays on Kimi K2.6 into the pages that say so."
    parser = argparse.ArgumentParser(prog="python -m kdlab.report.cost_page", description=text)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    options = parser.parse_args(arguments)
    write_pages(CostPage(load_evidence()).fill, options.pages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
