"""The study room: draft fields to acceptance at every budget, controls, calibration, cost and the best budget."""

from kdlab.study.acceptance import acceptance_by_depth, acceptance_by_rank
from kdlab.study.best import BestBudget, best_budget
from kdlab.study.calibration import calibration, missed_mass
from kdlab.study.compare import check_comparable, check_headline
from kdlab.study.controls import sweep_adaptive_chains, sweep_beam, sweep_chains
from kdlab.study.cost import CostTable, speed
from kdlab.study.gain import gain_by_kind
from kdlab.study.path_rank import min_budget
from kdlab.study.repetition import repeated_share, repetition, without_loops
from kdlab.study.siblings import acceptance_after_sibling
from kdlab.study.summary import length_histogram, summarize
from kdlab.study.sweeps import sweep, sweep_ar

__all__ = [
    "BestBudget",
    "CostTable",
    "acceptance_after_sibling",
    "acceptance_by_depth",
    "acceptance_by_rank",
    "best_budget",
    "calibration",
    "check_comparable",
    "check_headline",
    "gain_by_kind",
    "length_histogram",
    "min_budget",
    "missed_mass",
    "repeated_share",
    "repetition",
    "speed",
    "summarize",
    "sweep",
    "sweep_adaptive_chains",
    "sweep_ar",
    "sweep_beam",
    "sweep_chains",
    "without_loops",
]
