"""Every op in plain torch, at any float dtype and on any device: the specification of the kernels.

`ops` has the eight ops of the design, `layer`, `cache`, `draft`, `shards` and `streams` those around them. What they
need besides stands beside this folder: `mla` (visible keys and attention), `experts`, `int4`, `philox`.
"""

from kdlab.kernels.reference.cache import gather_path, norm_rope
from kdlab.kernels.reference.draft import append_context, draft_attention, head_norm_rope
from kdlab.kernels.reference.layer import add_norm, gate_halves, router, skinny_linear
from kdlab.kernels.reference.ops import (
    TOP_P_REACHED,
    TopK,
    draft_topk,
    kv_commit,
    moe_experts,
    rms_norm,
    target_sample,
    verify_attention,
)
from kdlab.kernels.reference.shards import (
    SampleShard,
    TopKShard,
    draft_topk_shard,
    target_sample_shard,
    top_p_mass_shard,
)
from kdlab.kernels.reference.streams import NO_STOP, round_rows, stream_advance

__all__ = [
    "NO_STOP",
    "TOP_P_REACHED",
    "SampleShard",
    "TopK",
    "TopKShard",
    "add_norm",
    "append_context",
    "draft_attention",
    "draft_topk",
    "draft_topk_shard",
    "gate_halves",
    "gather_path",
    "head_norm_rope",
    "kv_commit",
    "moe_experts",
    "norm_rope",
    "rms_norm",
    "round_rows",
    "router",
    "skinny_linear",
    "stream_advance",
    "target_sample",
    "target_sample_shard",
    "top_p_mass_shard",
    "verify_attention",
]
