"""The target: a DeepseekV3 decoder as Kimi K2.6 uses it, driven by its `config.json`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdlab.checks import check_int, check_shape
from kdlab.config import TargetConfig
from kdlab.errors import ArgumentError
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.ancestors import num_words
from kdlab.kernels.embed_shard import embed_shard
from kdlab.kernels.skinny_linear import skinny_linear
from kdlab.kernels.stage import span, stage
from kdlab.model.attention import AttentionPlan, KernelPlan, LatentAttention, plan_attention
from kdlab.model.cache import LatentCache
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.layers import Part, SwiGlu, parts, prefixed, weight, wholes
from kdlab.model.moe import MixtureOfExperts
from kdlab.model.ranks import ONE_RANK, Ranks
from kdlab.model.reading import Planned, Progress
from kdlab.model.target_tensors import Skipped, target_names
from kdlab.model.visible_rows import VisibleRows


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one forward returns."""

    hidden: Tensor  # [S, N, D] after the final norm
    tapped: tuple[Tensor, ...]  # [S, N, D] each, the residual stream after the tapped layers, in the order asked for
    expert_ids: Tensor | None  # [S, MoE layers, N, k] i16
    impl: str  # what the ops ran as: "reference" is plain torch, "verify_attention=wgmma" CUDA ops and this attention

    @property
    def taps(self) -> Tensor | None:
        """The tapped layers side by side, [S, N, len(tapped) * D]; None without any."""
        return torch.cat(self.tapped, dim=-1) if self.tapped else None


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on a normed copy of the residual stream; ranks add each of the two up once."""

    def __init__(
        self,
        config: TargetConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        packed: bool,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        super().__init__()
        self.eps, self.ranks = config.rms_norm_eps, ranks
        self.input_norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.attention = LatentAttention(config, layer, dtype=dtype, device=device, ranks=ranks)
        self.post_norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.mlp: MixtureOfExperts | SwiGlu = (
            MixtureOfExperts(config, dtype=dtype, device=device, packed=packed, ranks=ranks)
            if config.is_moe_layer(layer)
            else SwiGlu(config.hidden_size, config.intermediate_size, dtype=dtype, device=device, ranks=ranks)
        )

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        norms = wholes(input_layernorm=self.input_norm, post_attention_layernorm=self.post_norm)
        return norms | prefixed("self_attn.", self.attention) | prefixed("mlp.", self.mlp)

    def forward(
        self, x: Tensor, h: Tensor, plan: AttentionPlan | KernelPlan
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the layer on the residual stream x [T, D], T = S * N, and its norm h [T, D] by `input_norm`.

        Returns:
            The stream with the attention added, what the feed-forward adds to that next (both [T, D]: one launch adds
            and norms), and the expert ids [T, k] of a MoE layer.
        """
        attended = self.ranks.all_reduce(self.attention(h, plan), "attention")
        with stage("norms"):
            x, h = add_norm(x, attended, self.post_norm, self.eps, impl=plan.ops)
        if isinstance(self.mlp, SwiGlu):
            with stage("dense layers"):
                out, expert_ids = self.mlp(h, plan.ops), None
        else:
            out, expert_ids = self.mlp(h, plan.used, plan.ops)
        return x, self.ranks.all_reduce(out, "mlp"), expert_ids


class Target(nn.Module):
    """The whole decoder, or one rank's slice. A new one holds no values: load it, or initialise every parameter first.

    Parameters want no gradient until asked (`requires_grad_()`); the code is differentiable, but no gradient flows
    through a cache, so a training step passes `cache=None`. `skipped` counts the tensors that loading left out by rule.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        packed: bool = False,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Make the modules.

        Args:
            config: the constants.
            dtype: of weights and activations: bfloat16, float32 or float64.
            device: of the weights.
            packed: keep the routed experts as INT4 words.
            ranks: that share the decoder; this one's slice is made.

        Raises:
            ArgumentError: a dtype that no target has, or sizes that the ranks do not divide.
        """
        super().__init__()
        if dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ArgumentError("dtype", "bfloat16, float32 or float64", dtype)
        self.config, self.ranks = config, ranks
        self.skipped = Skipped()
        self.tokens = ranks.span(config.vocab_size, name="vocab_size")
        held = self.tokens.stop - self.tokens.start
        self.embedding = weight(held, config.hidden_size, dtype=dtype, device=device)
        layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device, packed=packed, ranks=ranks)
            for layer in range(config.num_hidden_layers)
        )
        self.layers = cast("Sequence[DecoderLayer]", layers)
        self.norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = None if config.tie_word_embeddings else weight(*self.embedding.shape, dtype=dtype, device=device)

    def views(self) -> dict[str, Part]:
        """Return every weight by its Hugging Face name: to load or to export."""
        rows = self.tokens, self.config.vocab_size
        found = {"model.embed_tokens.weight": Part.along(self.embedding, 0, *rows)}
        found |= {"model.norm.weight": Part.whole(self.norm)}
        if self.lm_head is not None:
            found |= parts(0, *rows, lm_head=self.lm_head)
        for i, layer in enumerate(self.layers):
            found |= prefixed(f"model.layers.{i}.", layer)
        return found

    def embed(self, tokens: Tensor, ops: str = "auto") -> Tensor:
        """Return the embeddings [..., D] of tokens [...] int; `ops` is what `embed_shard` runs as.

        Raises:
            ArgumentError: a token outside the vocabulary (checked on the CPU, where it costs no synchronisation).
        """
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = tokens.aminmax()
            if low < 0 or high >= self.config.vocab_size:
                raise ArgumentError("tokens", f"0 to {self.config.vocab_size - 1}", f"{int(low)} to {int(high)}")
        if self.ranks.size == 1:
            return F.embedding(tokens, self.embedding)
        own = embed_shard(tokens, self.embedding, first_id=self.tokens.start, impl=ops)
        return self.ranks.all_reduce(own, "embedding")

    def head(self, hidden: Tensor, ops: str = "reference") -> Tensor:
        """Return the logits [..., V] of hidden [..., D], in hidden's dtype; of several ranks this one's columns.

        Args:
            hidden: [..., D] float.
            ops: what `skinny_linear` runs as; the reference has gradients.
        """
        weight = self.embedding if self.lm_head is None else self.lm_head
        # One matrix: of blocks without their anchor slot torch would make a product a stream, each reading the weight.
        return skinny_linear(hidden.flatten(0, -2), weight, impl=ops).unflatten(0, hidden.shape[:-1])

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: LatentCache | None,
        start: Tensor,
        mask: Tensor | VisibleRows,
        *,
        taps: Sequence[int] = (),
        collect_experts: bool = False,
        impl: str = "auto",
    ) -> TargetOutput:
        """Run N rows a stream over the cache and over one another.

        A tree is verified with its ancestor mask; a prefill chunk is the same call with a lower triangle. Row i is
        written to the cache at start + i; its rope position is `positions`, which is not start + i in a tree.

        Args:
            tokens: [S, N] int. A row whose mask row is all False is padding: any token, and its output means nothing.
            positions: [S, N] int, absolute.
            cache: the latent cache of these streams; None lets the rows see one another alone, with gradients.
            start: [S] int, committed rows of each stream: all rows see them. Not read without a cache.
            mask: [S, N, N] bool, row i sees row j; or a VisibleRows, which spares a GPU the packing.
            taps: 0-based layers whose residual stream is returned.
            collect_experts: return the expert ids.
            impl: of the ops. "auto" runs the CUDA ops with a cache on a GPU and plain torch elsewhere; "reference" is
                plain torch; "naive", "mma", "wgmma" and "flashmla" choose the attention among the CUDA ops.

        Raises:
            ShapeError: the arguments do not fit one another. ArgumentError: a tap that is no layer, rows outside the
                cache or tokens outside the vocabulary. UnsupportedDevice, NotSupported: `impl` cannot run here.
        """
        self._check(tokens, positions, start, mask, taps)
        heads, dtype = self.layers[0].attention.num_heads, self.embedding.dtype
        plan = plan_attention(self.config, tokens, positions, cache, start, mask, dtype, impl, num_heads=heads)
        with stage("embedding"):
            x = self.embed(plan.tokens.flatten(), plan.ops)
        update: Tensor | None = None
        streams: list[Tensor] = []  # the residual stream before each layer, and after the last
        chosen: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            with span("layer", number):
                x, h = self._add_norm(x, update, layer.input_norm, plan)
                streams.append(x)
                x, update, expert_ids = layer(x, h, plan)
            if collect_experts and expert_ids is not None:
                chosen.append(expert_ids.to(torch.int16).view(*tokens.shape, -1))
        x, hidden = self._add_norm(x, update, self.norm, plan)
        streams.append(x)
        return TargetOutput(
            hidden=hidden.view(*tokens.shape, -1),
            tapped=tuple(streams[tap + 1].view(*tokens.shape, -1) for tap in taps),
            expert_ids=torch.stack(chosen, dim=1) if chosen else None,
            impl=plan.ran,
        )

    def _add_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, plan: AttentionPlan | KernelPlan
    ) -> tuple[Tensor, Tensor]:
        with stage("norms"):
            return add_norm(x, update, weight, self.config.rms_norm_eps, impl=plan.ops)

    def _check(
        self, tokens: Tensor, positions: Tensor, start: Tensor, mask: Tensor | VisibleRows, taps: Sequence[int]
    ) -> None:
        sizes = check_shape("tokens", tokens, ["S", "N"])
        check_shape("positions", positions, [sizes["S"], sizes["N"]])
        check_shape("start", start, [sizes["S"]])
        if isinstance(mask, VisibleRows):
            check_shape("mask.ancestors", mask.ancestors, [sizes["S"], sizes["N"], num_words(sizes["N"])])
            check_shape("mask.num_rows", mask.num_rows, [sizes["S"]])
        else:
            check_shape("mask", mask, [sizes["S"], sizes["N"], sizes["N"]])
        for tap in taps:
            check_int("taps", tap, minimum=0, maximum=self.config.num_hidden_layers - 1)


def load_target(
    directory: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    latent_norm_eps: float = 1e-6,
    progress: Progress | None = None,
) -> Target:
    """Load a Hugging Face directory; see `plan_target` for the arguments and errors."""
    return plan_target(directory, device=device, dtype=dtype, latent_norm_eps=latent_norm_eps).read(device, progress)


def plan_target(
    directory: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    latent_norm_eps: float = 1e-6,
    ranks: Ranks = ONE_RANK,
) -> Planned[Target]:
    """Check a Hugging Face directory from its config and headers; `read` of what comes back takes memory and reads.

    Experts in INT4 stay packed, each touched one dequantised in the op; on the CPU they are dequantised here instead,
    where the small models run many forwards.

    Args:
        directory: holds config.json and safetensors, one file or an index with shards.
        device: of the weights.
        dtype: of weights and activations.
        latent_norm_eps: epsilon of the q_a and kv_a norms, see `TargetConfig.from_dict`.
        ranks: that share the target; this one's slice is planned.

    Raises:
        ArgumentError: the ranks do not divide what is split over them.
        ConfigError: the config asks for what kdlab does not run.
        CheckpointError: tensors are missing, unknown, or of a wrong shape or dtype.
    """
    config = TargetConfig.load(directory, latent_norm_eps=latent_norm_eps)
    packed = config.experts_int4 and torch.device(device).type != "cpu"
    checkpoint = Checkpoint(directory)
    names, skipped = target_names(checkpoint, config.num_hidden_layers)

    def new(place: torch.device | str) -> Target:
        target = Target(config, dtype=dtype, device=place, packed=packed, ranks=ranks)
        target.skipped = skipped
        return target

    return Planned.check(new, checkpoint, names, int4=config.experts_int4)
