"""A made-up profile: rounds of two cases in a graph and eagerly, their counters, and a counted call of one op."""

import pandas as pd

from kdlab.profiling import launches_frame
from tests.profiling.samples import launch

WIDE, SMALL = "k2.6 slice 1/8, 2 layers, 33 rows", "mini, 16 rows"
CALL = "verify_attention S=1 N=33 prefix=4096 H=64 (wgmma)"
_LAYER = (("norms", 2), ("q_a and kv_a", 8), ("q_b", 3), ("latent projections", 4), ("norm_rope", 2), ("attention", 24),
          ("o_proj", 7), ("norms", 2), ("router", 5), ("experts", 60))  # fmt: skip
_BEFORE = (("draft context", 3), ("draft layers", 12), ("draft attention", 4), ("draft head", 6), ("draft_topk", 5),
           ("tree_build", 9), ("embedding", 1))  # fmt: skip
_AFTER = (("lm_head", 14), ("target_sample", 3), ("accept", 2), ("commit", 3))
STAGES = (*_BEFORE, *_LAYER, *_LAYER, *_AFTER)
"""Stage and microseconds of every launch of the wide round; one of no stage comes last."""
_GAP_US = {"graph": 0.5, "eager": 9.0}
_MATRIX = {"experts": 55.0, "attention": 60.0, "lm_head": 12.0, "o_proj": 20.0, "q_a and kv_a": 18.0, "q_b": 10.0}
PROVENANCE = {
    "run_id": "1", "gpu": "a made-up GPU", "gpu_uuid": "GPU-1", "git_commit": "0123456789ab", "git_dirty": False,
    "floors": {
        WIDE: {stage: [500_000 * us, 40_000_000 * us, 1] for stage, us in STAGES},
        CALL: {"verify_attention": [5_000_000, 900_000_000, 1]},
    },
}  # fmt: skip


def timeline(case, mode, repeat, scale=1.0, gap_us=None):
    """Launches of one round one behind the other; the experts' begin a microsecond before the router's have ended."""
    rows, start = [], 0.0
    gap_us = _GAP_US[mode] + repeat if gap_us is None else gap_us
    for position, (stage, us) in enumerate((*STAGES, ("", 1))):
        start -= 1.0 + gap_us if stage == "experts" else 0.0
        own = {"case": case, "mode": mode, "repeat": repeat, "kernel": f"{stage or 'memcpy'}_kernel".replace(" ", "_")}
        rows.append(launch(position, stage, source="torch.profiler", start_us=start, duration_us=us * scale, **own))
        start += us * scale + gap_us
    return rows


def counted(case):
    """Each launch of a round replayed alone: a fifth slower, with bytes, and operations where matrix units work."""
    rows = []
    for position, (stage, us) in enumerate(STAGES):
        busy = _MATRIX.get(stage, 0.0)
        own = {"case": case, "kernel": f"{stage}_kernel".replace(" ", "_"), "duration_us": 1.2 * us}
        own |= {"dram_read": 1e6 * us, "dram_write": 1e5 * us, "l2_read": 2e6 * us, "dram_pct": 40.0, "sm_pct": 50.0}
        rows.append(launch(position, stage, **own, tensor_pct=busy, tensor_flops=3e6 * busy * us))
    return rows


def call():
    """Two launches of one call of verify_attention."""
    own = {"subject": "kernels", "case": CALL, "dram_read": 5e6, "l2_read": 1e8}
    return [
        launch(0, "verify_attention", **own, kernel="attend", dram_write=1e6, tensor_pct=60.0, duration_us=40.0),
        launch(1, "verify_attention", **own, kernel="merge", dram_write=0.0, tensor_pct=0.0, duration_us=5.0),
    ]  # fmt: skip


def profiled() -> pd.DataFrame:
    """Return three rounds of each case and mode, and what was counted of a round and of a call."""
    rows = []
    for repeat in (0, 1, 2):
        for mode in ("graph", "eager"):
            rows += timeline(WIDE, mode, repeat)
            rows += timeline(SMALL, mode, repeat, scale=0.2, gap_us=None if mode == "eager" else 0.3)
    return launches_frame([*rows, *counted(WIDE), *call()], PROVENANCE)
