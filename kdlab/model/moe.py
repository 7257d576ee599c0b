"""The mixture of experts: a sigmoid router with a correction bias, routed experts, and a shared one."""

import torch
from torch import Tensor, nn

from kdlab.config import INT4_GROUP, TargetConfig
from kdlab.kernels.experts import DenseExperts, PackedExperts
from kdlab.kernels.int4 import VALUES_PER_WORD
from kdlab.kernels.mla import compute_dtype
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.kernels.router import router
from kdlab.kernels.stage import stage
from kdlab.model.layers import Part, SwiGlu, prefixed, weight
from kdlab.model.ranks import ONE_RANK, Ranks


class Router(nn.Module):
    """Chooses k of E experts a row, by sums in float32 (float64 for float64): near-ties decide what is read."""

    def __init__(self, config: TargetConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.gate = weight(config.n_routed_experts, config.hidden_size, dtype=dtype, device=device)
        self.bias = weight(config.n_routed_experts, dtype=compute_dtype(dtype), device=device)

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        return {"weight": Part.whole(self.gate), "e_score_correction_bias": Part.whole(self.bias)}

    def forward(self, x: Tensor, used: Tensor | None = None, ops: str = "reference") -> tuple[Tensor, Tensor]:
        """Route rows x [T, D], see `kdlab.kernels.router`.

        Args:
            x: [T, D] float.
            used: [T] bool, rows in use; the others get ids -1.
            ops: what `router` runs as.

        Returns:
            expert_ids [T, k] i32 and weights [T, k] float32 (float64 for float64).
        """
        config = self.config
        return router(
            x,
            self.gate,
            self.bias,
            config.num_experts_per_tok,
            config.routed_scaling_factor,
            normalize=config.norm_topk_prob,
            groups=(config.n_group, config.topk_group),
            used=used,
            impl=ops,
        )


class ExpertSplit:
    """Which of a layer's routed experts a rank holds, and which part of each one's inner width I.

    Attributes:
        experts: of E; all of them with "tp".
        inner: of I; all of it with "ep".
    """

    def __init__(self, config: TargetConfig, ranks: Ranks, unit: int) -> None:
        """Split over the ranks, the inner width in units of `unit`."""
        self.num_experts, self.width = config.n_routed_experts, config.moe_intermediate_size
        self.experts, self.inner = slice(0, self.num_experts), slice(0, self.width)
        if ranks.experts == "ep":
            self.experts = ranks.span(self.num_experts, name="n_routed_experts")
        else:
            self.inner = ranks.span(self.width, unit, name="moe_intermediate_size")

    @property
    def held(self) -> tuple[int, int]:
        """Experts and inner values of each that this rank holds."""
        return self.experts.stop - self.experts.start, self.inner.stop - self.inner.start

    def views(self, gate_up: Tensor, down: Tensor, suffix: str, values: int = 1) -> dict[str, Part]:
        """Return the weights by checkpoint name; `values` of the inner width stand in one word or scale of `down`.

        Experts of other ranks are there as well, as parts that hold nothing, so that every rank knows all names.
        """
        gate, up = gate_up.chunk(2, dim=1)
        columns = slice(self.inner.start // values, self.inner.stop // values)
        found = {}
        for expert in range(self.num_experts):
            own = expert - self.experts.start if self.experts.start <= expert < self.experts.stop else None
            for name, bank, axis, span, total in (
                ("gate_proj", gate, 0, self.inner, self.width),
                ("up_proj", up, 0, self.inner, self.width),
                ("down_proj", down, 1, columns, self.width // values),
            ):
                part = Part.along(bank[own or 0], axis, span, total)
                found[f"{expert}.{name}.{suffix}"] = part.nothing() if own is None else part
        return found


def _unit(config: TargetConfig, device: torch.device | str) -> int:
    """Return how many inner values stay on one rank: a group of INT4, of which the CUDA op takes whole ones anyway."""
    on_gpu = torch.device(device).type == "cuda" and config.moe_intermediate_size % INT4_GROUP == 0
    return INT4_GROUP if config.experts_int4 or on_gpu else 1


class DenseExpertBank(nn.Module):
    """Routed experts as stacked matrices in the compute dtype."""

    def __init__(
        self, config: TargetConfig, *, dtype: torch.dtype, device: torch.device | str, ranks: Ranks = ONE_RANK
    ) -> None:
        super().__init__()
        self.split = ExpertSplit(config, ranks, _unit(config, device))
        (experts, inner), width = self.split.held, config.hidden_size
        self.gate_up = weight(experts, 2 * inner, width, dtype=dtype, device=device)
        self.down = weight(experts, width, inner, dtype=dtype, device=device)

    @property
    def experts(self) -> DenseExperts:
        """The weights as the op reads them."""
        return DenseExperts(self.gate_up, self.down)

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        return self.split.views(self.gate_up, self.down, "weight")


class PackedExpertBank(nn.Module):
    """Routed experts as they lie on disk, INT4 words and 16-bit scales; the op dequantises the experts it touches."""

    def __init__(self, config: TargetConfig, *, device: torch.device | str, ranks: Ranks = ONE_RANK) -> None:
        super().__init__()
        self.split = ExpertSplit(config, ranks, INT4_GROUP)
        (experts, inner), width = self.split.held, config.hidden_size

        def new(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
            return weight(experts, rows, columns, dtype=dtype, device=device)

        self.gate_up_packed = new(2 * inner, width // VALUES_PER_WORD, torch.int32)
        self.gate_up_scale = new(2 * inner, width // INT4_GROUP, torch.bfloat16)
        self.down_packed = new(width, inner // VALUES_PER_WORD, torch.int32)
        self.down_scale = new(width, inner // INT4_GROUP, torch.bfloat16)

    @property
    def experts(self) -> PackedExperts:
        """The weights as the op reads them."""
        return PackedExperts(self.gate_up_packed, self.gate_up_scale, self.down_packed, self.down_scale)

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        packed = self.split.views(self.gate_up_packed, self.down_packed, "weight_packed", VALUES_PER_WORD)
        return packed | self.split.views(self.gate_up_scale, self.down_scale, "weight_scale", INT4_GROUP)


class MixtureOfExperts(nn.Module):
    """Routed experts plus the shared one, which has weight 1 and is not scaled; a rank computes a summand of both."""

    def __init__(
        self,
        config: TargetConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        packed: bool,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        super().__init__()
        self.router = Router(config, dtype=dtype, device=device)
        self.shared: SwiGlu | None = None
        self.routed: DenseExpertBank | PackedExpertBank = (
            PackedExpertBank(config, device=device, ranks=ranks)
            if packed
            else DenseExpertBank(config, dtype=dtype, device=device, ranks=ranks)
        )
        inner, unit = config.n_shared_experts * config.moe_intermediate_size, _unit(config, device)
        if inner:
            self.shared = SwiGlu(config.hidden_size, inner, dtype=dtype, device=device, ranks=ranks, unit=unit)

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        found = prefixed("gate.", self.router) | prefixed("experts.", self.routed)
        return found if self.shared is None else found | prefixed("shared_experts.", self.shared)

    def forward(self, x: Tensor, used: Tensor | None = None, ops: str = "reference") -> tuple[Tensor, Tensor]:
        """Map rows x [T, D], already normed.

        Args:
            x: [T, D] float.
            used: [T] bool, rows in use: the others ask for no expert. None for all.
            ops: what the ops run as, "auto" or "reference".

        Returns:
            [T, D] in x's dtype, this rank's summand, and the expert ids [T, k] i32 of the whole layer.
        """
        with stage("router"):
            expert_ids, weights = self.router(x, used, ops)
        with stage("experts"):
            # Ids of other ranks' experts fall outside, where no expert is. With "tp" it would be a launch for nothing.
            first = self.routed.split.experts.start
            own = expert_ids - first if first else expert_ids
            if ops == "auto":
                return moe_int4(x, own, weights, self.routed.experts, shared=self._shared_expert()), expert_ids
            out = moe_int4(x, own, weights, self.routed.experts, impl=ops)
            return out if self.shared is None else out + self.shared(x, ops), expert_ids

    def _shared_expert(self) -> DenseExperts | None:
        """Return the shared expert as the op reads it, an expert of a set of one."""
        return None if self.shared is None else DenseExperts(self.shared.gate_up[None], self.shared.down[None])
