"""The study room: draft fields to acceptance at every budget, controls, calibration, cost and the best budget."""

from kdlab.study.acceptance import acceptance_by_depth, acceptance_by_rank
from kdlab.study.best import BestBudget, best_budget
from kdlab.study.calibration import calibration, missed_mass
from kdlab.study.compare import check_comparable, check_headline
from kdlab.study.controls import sweep_adaptive_chains, sweep_beam, sweep_chains
from kdlab.study.cost import CostTable, speed
from kdlab.study.gain import gain_by_kind
from kdlab.study.grid_table import load
from kdlab.study.live import check_live, sweep_live, whole_groups
from kdlab.study.paired import compare_paired, holm
from kdlab.study.path_rank import min_budget
from kdlab.study.published import published_acceptance
from kdlab.study.repetition import repeated_share, repetition, without_loops
from kdlab.study.siblings import acceptance_after_sibling
from kdlab.study.summary import length_histogram, summarize
from kdlab.study.sweeps import chosen_budgets, sweep, sweep_ar
from kdlab.study.traces.engines import import_responses
from kdlab.study.traces.files import check_trace, load_trace, save_trace
from kdlab.study.traces.jsonl import read_json_lines
from kdlab.study.traces.rounds import RoundTrace, round_trace, trace_of_run
from kdlab.study.traces.table import trace_limits, trace_summary, traces_table

__all__ = [
    "BestBudget",
    "CostTable",
    "RoundTrace",
    "acceptance_after_sibling",
    "acceptance_by_depth",
    "acceptance_by_rank",
    "best_budget",
    "calibration",
    "check_comparable",
    "check_headline",
    "check_live",
    "check_trace",
    "chosen_budgets",
    "compare_paired",
    "gain_by_kind",
    "holm",
    "import_responses",
    "length_histogram",
    "load",
    "load_trace",
    "min_budget",
    "missed_mass",
    "published_acceptance",
    "read_json_lines",
    "repeated_share",
    "repetition",
    "round_trace",
    "save_trace",
    "speed",
    "summarize",
    "sweep",
    "sweep_adaptive_chains",
    "sweep_ar",
    "sweep_beam",
    "sweep_chains",
    "sweep_live",
    "trace_limits",
    "trace_of_run",
    "trace_summary",
    "traces_table",
    "whole_groups",
    "without_loops",
]
