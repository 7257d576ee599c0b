"""Constants of Kimi K2.6 and its drafter, for cost tests."""

from kdlab.config import DrafterConfig, TargetConfig
from kdlab.paths import K26_SHAPES

TARGET, DRAFTER = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
EXPERTS = {"num_experts": TARGET.n_routed_experts, "per_token": TARGET.num_experts_per_tok}
