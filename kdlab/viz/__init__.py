"""Results in, matplotlib axes out: draft trees, coloured text, the budget sweep, acceptance; widgets on top of them."""

from kdlab.viz.acceptance import (
    plot_acceptance_by_depth,
    plot_calibration,
    plot_length_histogram,
    plot_missed_mass,
    plot_rank_heatmap,
)
from kdlab.viz.arms import arm_label
from kdlab.viz.findings import (
    acceptance_findings,
    cost_findings,
    depth_findings,
    paired_findings,
    speed_findings,
)
from kdlab.viz.kernels import plot_bytes_read, plot_kernel_dots, plot_kernel_errors, plot_kernel_growth
from kdlab.viz.kinds import kind_findings, plot_by_kind
from kdlab.viz.nsight import plot_busy_share, plot_stage_shares, plot_timeline
from kdlab.viz.nsight_counters import plot_roofline, plot_stage_bytes, plot_tensor_use
from kdlab.viz.nsight_words import counter_findings, round_findings
from kdlab.viz.paired import paired_sentences, plot_paired
from kdlab.viz.siblings import plot_after_sibling, sibling_findings
from kdlab.viz.sweep import plot_budget_sweep, plot_cost, plot_speed, plot_tokens_per_round
from kdlab.viz.text import text_html, token_origins
from kdlab.viz.theme import caption, figure_of, png_bytes
from kdlab.viz.traces import plot_trace, trace_findings
from kdlab.viz.trees import plot_draft_tree, plot_rounds, round_title
from kdlab.viz.verdict import LiveMargin, live_margin, verdict
from kdlab.viz.widgets.acceptance_explorer import AcceptanceExplorer
from kdlab.viz.widgets.kernel_explorer import KernelExplorer
from kdlab.viz.widgets.live_sweep import LiveSweep
from kdlab.viz.widgets.live_sweep_figure import live_findings, plot_live_sweep
from kdlab.viz.widgets.round_viewer import RoundViewer
from kdlab.viz.widgets.tree_explorer import TreeExplorer
from kdlab.viz.wording import best_sentence, percent, plain_sentences

__all__ = [
    "AcceptanceExplorer",
    "KernelExplorer",
    "LiveMargin",
    "LiveSweep",
    "RoundViewer",
    "TreeExplorer",
    "acceptance_findings",
    "arm_label",
    "best_sentence",
    "caption",
    "cost_findings",
    "counter_findings",
    "depth_findings",
    "figure_of",
    "kind_findings",
    "live_findings",
    "live_margin",
    "paired_findings",
    "paired_sentences",
    "percent",
    "plain_sentences",
    "plot_acceptance_by_depth",
    "plot_after_sibling",
    "plot_budget_sweep",
    "plot_busy_share",
    "plot_by_kind",
    "plot_bytes_read",
    "plot_calibration",
    "plot_cost",
    "plot_draft_tree",
    "plot_kernel_dots",
    "plot_kernel_errors",
    "plot_kernel_growth",
    "plot_length_histogram",
    "plot_live_sweep",
    "plot_missed_mass",
    "plot_paired",
    "plot_rank_heatmap",
    "plot_roofline",
    "plot_rounds",
    "plot_speed",
    "plot_stage_bytes",
    "plot_stage_shares",
    "plot_tensor_use",
    "plot_timeline",
    "plot_tokens_per_round",
    "plot_trace",
    "png_bytes",
    "round_findings",
    "round_title",
    "sibling_findings",
    "speed_findings",
    "text_html",
    "token_origins",
    "trace_findings",
    "verdict",
]
