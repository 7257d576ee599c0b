"""A target with its drafter and tokenizer, loaded together and checked against each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_int
from kdlab.errors import ArgumentError, ConfigError, UnsupportedDevice
from kdlab.kernels.draft_topk import MAX_K, TopK
from kdlab.kernels.embed_shard import embed_blocks, make_blocks
from kdlab.kernels.stage import stage
from kdlab.model.checkpoint import checkpoint_sha256
from kdlab.model.draft_context import DraftContext
from kdlab.model.drafter import Drafter, plan_drafter
from kdlab.model.fit import check_room
from kdlab.model.rank_heads import sample_over_ranks, top_over_ranks
from kdlab.model.ranks import EXPERT_MODES, ONE_RANK, Ranks, init_ranks, local_device
from kdlab.model.reading import Planned, Progress
from kdlab.model.target import Target, plan_target
from kdlab.model.tokenizer import Tokenizer, load_tokenizer_if_any
from kdlab.paths import bundled_pair

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class Pair:
    """What a decode needs.

    Attributes:
        target: the model whose text is produced.
        drafter: the DFlash drafter, or None; without one only AR decoding runs.
        tokenizer: of the target; a checkpoint without one takes prompts as token ids.
        name: what `load_pair` was given as `target`.
        target_sha256, drafter_sha256: see `checkpoint_sha256`; the drafter's is None without a drafter.
    """

    target: Target
    drafter: Drafter | None
    tokenizer: Tokenizer
    name: str
    target_sha256: str
    drafter_sha256: str | None
    device: torch.device
    dtype: torch.dtype

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the models."""
        return self.target.ranks

    @property
    def taps(self) -> tuple[int, ...]:
        """0-based target layers whose output the drafter reads."""
        return () if self.drafter is None else self.drafter.config.target_layer_ids

    @property
    def depth_limit(self) -> int:
        """Draft positions L of one round, 0 without a drafter."""
        return 0 if self.drafter is None else self.drafter.config.depth_limit

    def new_context(self, num_streams: int, max_positions: int) -> DraftContext:
        """Return an empty draft context on the pair's device; see `Drafter.new_context`."""
        return self._drafter().new_context(num_streams, max_positions, self.device, self.dtype)

    def extend_context(
        self, context: DraftContext, taps: Tensor | None, start: Tensor, count: Tensor, impl: str = "auto"
    ) -> None:
        """Give the drafter the tapped layers of newly committed rows; see `Drafter.extend`."""
        if taps is None:
            raise ArgumentError("taps", "the tapped layers of the target", "none")
        self._drafter().extend(context, taps, start, count, impl)

    def draft_logits(self, anchor: Tensor, start: Tensor, context: DraftContext, impl: str = "auto") -> Tensor:
        """Return the logits of the L draft positions behind each anchor, of several ranks this one's columns.

        Args:
            anchor: [S] int, the token at absolute position `start`, not yet run through the target.
            start: [S] int, committed rows.
            context: holds the context features of positions 0..start-1 of each stream.
            impl: of the drafter's ops, "auto" or "reference".

        Returns:
            [S, L, V / ranks]; row i, of slot i + 1, predicts absolute position start + 1 + i.
        """
        drafter = self._drafter()
        config = drafter.config
        with stage("draft layers"):
            rows = self._embed_blocks(anchor, config.block_size, config.mask_token_id, impl)
        hidden = drafter(rows, start, context, impl)
        with stage("draft head"):
            return self.target.head(hidden[:, 1:], impl)

    def draft_top(self, anchor: Tensor, start: Tensor, context: DraftContext, k: int, impl: str = "auto") -> TopK:
        """Return the drafter's K best tokens of each draft position; see `draft_logits` and `draft_topk`."""
        logits = self.draft_logits(anchor, start, context, impl)
        # The kernel keeps 256 candidates at most; torch ranks the more that a large budget asks for.
        impl = "reference" if k > MAX_K else impl
        with stage("draft_topk"):
            return top_over_ranks(self.ranks, logits, k, impl)

    def sample(
        self,
        hidden: Tensor,
        *,
        temperature: float,
        top_p: float,
        seed: int,
        stream: Tensor,
        position: Tensor,
        impl: str = "auto",
    ) -> Tensor:
        """Return the target's token [S, N] i32 behind rows of hidden [S, N, D]; see `target_sample`."""
        with stage("lm_head"):
            logits = self.target.head(hidden, impl)
        with stage("target_sample"):
            return sample_over_ranks(
                self.ranks, logits,
                temperature=temperature, top_p=top_p, seed=seed, stream=stream, position=position, impl=impl,
            )  # fmt: skip

    def _embed_blocks(self, anchor: Tensor, block_size: int, mask_id: int, impl: str) -> Tensor:
        """Return the target's embeddings [S, b, D] of blocks of an anchor [S] int and b - 1 mask tokens."""
        target = self.target
        if self.ranks.size == 1 or anchor.device.type == "cpu":  # where `embed` looks at the tokens
            return target.embed(make_blocks(anchor, block_size, mask_id), impl)
        shard = {"first_id": target.tokens.start, "block_size": block_size, "mask_id": mask_id}
        return self.ranks.all_reduce(embed_blocks(anchor, target.embedding, **shard, impl=impl), "embedding")

    def _drafter(self) -> Drafter:
        if self.drafter is None:
            raise ArgumentError("pair", "a pair with a drafter", "none")
        return self.drafter


def load_pair(
    target: str | Path = "bundled",
    drafter: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    ranks: int = 1,
    experts: str = "tp",
    latent_norm_eps: float = 1e-6,
    rope_amplitude: float = 1.0,
    progress: Progress | None = None,
) -> Pair:
    """Load a target, its drafter and its tokenizer.

    Args:
        target: a Hugging Face directory, or a shipped pair: "bundled", "bundled-b16" or "tiny".
        drafter: a DFlash directory; None takes the shipped pair's own, and no drafter for a directory.
        device: "cpu", "cuda" or "cuda:N".
        dtype: "float32", "bfloat16" or "float64".
        ranks: processes that share the models. With N of them, each process that `torchrun --nproc-per-node N` started
            makes this call with the same arguments, and then the same calls of the pair; with "cuda" each takes its
            own GPU.
        experts: "tp" splits the inner width of every routed expert over the ranks, "ep" gives each rank whole experts.
        latent_norm_eps: epsilon of the q_a and kv_a norms; 1e-6 as Moonshot's code and transformers, 1e-5 as SGLang.
        rope_amplitude: factor on the drafter's cos and sin tables; some engines ran K2.5's drafter with 1.4159.
        progress: called now and then while weights are read, and once at the end of each checkpoint.

    Raises:
        ArgumentError: an argument has a wrong value, there is no such directory or shipped pair, torchrun did not start
            as many ranks, or they do not divide what they share.
        UnsupportedDevice: torch does not see the GPU that was asked for, or the weights do not fit in its memory.
        ConfigError: a config or tokenizer file asks for what kdlab does not run, or target and drafter do not match.
        CheckpointError: tensors are missing, unknown, or of a wrong shape or dtype.
    """
    target_dir, drafter_dir = _directories(target, drafter)
    check_choice("experts", experts, EXPERT_MODES)
    check_int("ranks", ranks, minimum=1)
    torch_dtype, torch_device = _dtype(dtype), _device(device)
    place = _ranks(ranks, experts, torch_device)
    if place.size > 1:
        torch_device = local_device(torch_device)
    # All that headers and configs can tell, before any memory is taken: reading takes minutes.
    planned = plan_target(
        target_dir, device=torch_device, dtype=torch_dtype, latent_norm_eps=latent_norm_eps, ranks=place
    )
    plans: list[Planned[Any]] = [planned]
    if drafter_dir is not None:
        plans.append(plan_drafter(drafter_dir, dtype=torch_dtype, rope_amplitude=rope_amplitude, ranks=place))
        _check_match(planned.empty, plans[1].empty)
    tokenizer = load_tokenizer_if_any(Path(target_dir), planned.empty.config.vocab_size)
    check_room(sum(plan.nbytes for plan in plans), torch_device)
    loaded, *draft = (plan.read(torch_device, progress) for plan in plans)
    return Pair(
        target=loaded,
        drafter=draft[0] if draft else None,
        tokenizer=tokenizer,
        name=str(target),
        target_sha256=checkpoint_sha256(target_dir),
        drafter_sha256=None if drafter_dir is None else checkpoint_sha256(drafter_dir),
        device=torch_device,
        dtype=torch_dtype,
    )


def _ranks(ranks: int, experts: str, device: torch.device) -> Ranks:
    if ranks == 1:
        return ONE_RANK
    joined = init_ranks(device, experts)
    if joined.size != ranks:
        raise ArgumentError("ranks", f"the {joined.size} processes that torchrun started", ranks)
    return joined


def _directories(target: str | Path, drafter: str | Path | None) -> tuple[Path, Path | None]:
    for name, value in (("target", target), ("drafter", drafter)):
        if not isinstance(value, str | Path) and not (value is None and name == "drafter"):
            raise ArgumentError(name, "a directory or a name", repr(value))
    if drafter is not None and not _is_directory(drafter):
        raise ArgumentError("drafter", "a directory", repr(str(drafter)))
    if _is_directory(target):
        return Path(target), None if drafter is None else Path(drafter)
    target_dir, drafter_dir = bundled_pair(str(target))
    return target_dir, drafter_dir if drafter is None else Path(drafter)


def _is_directory(value: str | Path) -> bool:
    try:
        return Path(value).is_dir()
    except OSError:  # longer than a path may be
        return False


def _device(device: str | torch.device) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError("device", "'cpu', 'cuda' or 'cuda:N'", repr(device)) from error
    check_choice("device", parsed.type, ("cpu", "cuda"))
    if parsed.type == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedDevice(f"device {str(device)!r}: torch {torch.__version__} sees no CUDA GPU; use 'cpu'")
        if parsed.index is not None and parsed.index >= torch.cuda.device_count():
            raise UnsupportedDevice(f"device {str(device)!r}: this machine has {torch.cuda.device_count()} GPUs")
    return parsed


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    named = _DTYPES.get(str(dtype).removeprefix("torch."))
    if named is None:
        raise ArgumentError("dtype", "one of " + ", ".join(_DTYPES), repr(dtype))
    return named


def _check_match(target: Target, drafter: Drafter) -> None:
    ours, theirs = target.config, drafter.config
    equal = {
        "hidden_size": (ours.hidden_size, theirs.hidden_size),
        "vocab_size": (ours.vocab_size, theirs.vocab_size),
        "num_target_layers": (ours.num_hidden_layers, theirs.num_target_layers),
    }
    for name, (expected, got) in equal.items():
        if expected != got:
            raise ConfigError(f"drafter {name}: expected the target's {expected}, got {got}")
