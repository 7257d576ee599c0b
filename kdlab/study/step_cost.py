"""Bytes, operations and launches of one round at a model's true shapes: stage by stage, for one rank of several.

A stage's floor on a machine is the longer of its bytes' and its operations' time, plus a launch each time it is called.
Activations stay in the residual's 16 bits; every weight is read once, and of the experts only the distinct ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kdlab.checks import check_choice, check_float, check_int
from kdlab.config import INT4_GROUP, DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.kernels.add_norm import add_norm_cost
from kdlab.kernels.constants import PAGE_SIZE
from kdlab.kernels.cost import Cost
from kdlab.kernels.kv_commit import kv_commit_cost
from kdlab.kernels.norm_rope import norm_rope_cost
from kdlab.kernels.tree_accept import tree_accept_cost
from kdlab.kernels.tree_build import tree_build_cost
from kdlab.kernels.verify_attention import verify_attention_cost
from kdlab.kernels.verify_attention_wgmma import most_parts
from kdlab.study.experts import busiest_rank, distinct_experts

LAUNCH_US = 1.1
"""What a kernel costs in a CUDA graph that does nothing: added to a floor for each launch."""
_VALUE = 2  # bytes of bfloat16
_ATTENTION_TILE, _MULTIPROCESSORS = 64, 132  # (row, head) pairs of a tile of attention; an H200's, a block each
_TILE_PRICE = 1.3  # of a tile's operations beside plain products', as a softmax stands between; recorded: 1.2 to 1.4


@dataclass(frozen=True, slots=True)
class Step:
    """What one round is asked for.

    Attributes:
        rows: N, rows verified a stream, the root included.
        distinct: distinct experts that a layer's rows use, over all ranks; see `distinct_experts`.
        streams: S.
        context: committed rows of each stream.
        ranks: tensor-parallel ranks.
        experts: "tp", every rank holds a slice of each expert, or "ep", whole experts.
        top_k: draft candidates a slot.
        committed: rows that a stream commits, its bonus token left out.
    """

    rows: int
    distinct: float
    streams: int = 1
    context: int = 1024
    ranks: int = 1
    experts: str = "tp"
    top_k: int = 64
    committed: int = 4

    def __post_init__(self) -> None:
        for name in ("rows", "streams", "ranks", "top_k", "committed"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("context", self.context, minimum=0)
        check_float("distinct", self.distinct, above=0.0)
        check_choice("experts", self.experts, ("tp", "ep"))

    @classmethod
    def routed(cls, target: TargetConfig, rows: int, g: float, *, streams: int = 1, **more: Any) -> "Step":
        """Return the step whose rows route with exponent g within a stream; `more` are further attributes."""
        sizes = {"num_experts": target.n_routed_experts, "per_token": target.num_experts_per_tok}
        return cls(rows, distinct_experts(rows, g=g, streams=streams, **sizes), streams=streams, **more)

    @property
    def tokens(self) -> int:
        """T = S * N, rows of all streams."""
        return self.streams * self.rows


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a round, of one rank.

    Attributes:
        name: of the stage.
        cost: of all its calls together.
        launches: fewest kernels, over all layers.
        replicated: of the bytes, those that every rank reads alike, whatever the number of ranks.
        parts: pieces to which its work is dealt out and which are put together one behind the other, over all calls.
        hides: it loads while it computes, so that the shorter of its two times costs nothing.
        tiled: operations that its time goes by in place of the cost's: of whole tiles, unused rows too; 0: the cost's.
    """

    name: str
    cost: Cost
    launches: int
    replicated: int = 0
    parts: int = 0
    hides: bool = False
    tiled: float = 0.0

    def floor_us(self, *, bytes_per_s: float, flops_per_s: float, launch_us: float) -> float:
        """Return microseconds that no implementation beats, see the module's first lines."""
        return self.cost.floor_us(bytes_per_s=bytes_per_s, flops_per_s=flops_per_s) + launch_us * self.launches


def round_stages(target: TargetConfig, drafter: DrafterConfig | None, step: Step) -> tuple[Stage, ...]:
    """Return the stages of a round: the target's, then the drafter's and the tree's (none for AR).

    Args:
        target, drafter: constants of the models.
        step: what is asked.

    Raises:
        ArgumentError: heads, experts or widths do not divide by the ranks.
    """
    _check_ranks(target, drafter, step)
    stages = [*_attention_stages(target, step), *_feed_forward_stages(target, step)]
    stages += _head_stages(target, drafter, step)
    if drafter is not None:
        stages += _draft_stages(target, drafter, step)
    return tuple(stages)


def round_parts(target: TargetConfig, step: Step) -> tuple[tuple[str, Stage], ...]:
    """Return what stands inside a stage of `round_stages`, as a stage of its own: pairs of that stage's name and it.

    It is counted there already. By itself the shared expert reads and writes its rows as a dense layer does; among the
    routed experts, whose rows it shares, it has no launches.

    Args:
        target: constants.
        step: what is asked.

    Raises:
        ArgumentError: as `round_stages`.
    """
    _check_ranks(target, None, step)
    rows, width = step.tokens, target.hidden_size
    norm = add_norm_cost(rows, width)
    parts = [("norms", Stage("final norm", norm, 1, norm.bytes))]
    moe = sum(target.is_moe_layer(layer) for layer in range(target.num_hidden_layers))
    if moe and target.n_shared_experts:
        inner = target.n_shared_experts * target.moe_intermediate_size // step.ranks
        parts.append(("experts", Stage("shared expert", _swiglu_cost(rows, width, inner, moe), 2 * moe)))
    return tuple(parts)


def all_reduces(target: TargetConfig, drafter: DrafterConfig | None, step: Step) -> tuple[int, int]:
    """Return how many all-reduces of activations a round makes, and the bytes of them all; (0, 0) on one rank.

    Two a target layer (after o_proj and after the experts), one for the embedding; the drafter's layers alike, with one
    for its embedding and one for the context's features, which are gathered and so take less. The merges of top K and
    sampling move a few bytes a row.
    """
    if step.ranks == 1:
        return 0, 0
    width = _VALUE * target.hidden_size
    calls, moved = 1 + 2 * target.num_hidden_layers, (1 + 2 * target.num_hidden_layers) * step.tokens * width
    if drafter is not None:
        block = step.streams * drafter.block_size
        calls += 2 + 2 * drafter.num_hidden_layers
        moved += width * ((1 + 2 * drafter.num_hidden_layers) * block + step.streams * step.committed)
    return calls, moved


def rank_weights(target: TargetConfig, drafter: DrafterConfig, ranks: int) -> int:
    """Return about how many bytes of weights one rank holds: what a round of one row reads that wakes every expert."""
    stages = round_stages(target, drafter, Step(1, float(target.n_routed_experts), context=0, ranks=ranks))
    return sum(stage.cost.bytes for stage in stages) + _VALUE * target.vocab_size * target.hidden_size // ranks


def linear_cost(rows: int, inner: int, outer: int, calls: int = 1) -> Cost:
    """Return the cost of `calls` products of [rows, inner] with different weights [outer, inner]."""
    values = inner * outer + rows * (inner + outer)
    return Cost(calls * _VALUE * values, calls * 2 * rows * inner * outer)


def _swiglu_cost(rows: int, width: int, inner: int, calls: int) -> Cost:
    return linear_cost(rows, width, 2 * inner, calls) + linear_cost(rows, inner, width, calls)


def _times(cost: Cost, calls: int) -> Cost:
    return Cost(cost.bytes * calls, cost.flops * calls)


def _check_ranks(target: TargetConfig, drafter: DrafterConfig | None, step: Step) -> None:
    sizes = {
        "num_attention_heads": target.num_attention_heads,
        "vocab_size": target.vocab_size,
        "intermediate_size": target.intermediate_size,
    }
    if step.experts == "ep":
        sizes["n_routed_experts"] = target.n_routed_experts
    else:
        sizes["moe_intermediate_size in INT4 groups"] = target.moe_intermediate_size // INT4_GROUP
    if drafter is not None:
        sizes["num_key_value_heads of the drafter"] = drafter.num_key_value_heads
    for name, size in sizes.items():
        if size % step.ranks:
            raise ArgumentError("ranks", f"a divisor of {name} = {size}", step.ranks)


def _attention_stages(target: TargetConfig, step: Step) -> Iterator[Stage]:
    rows, width, layers = step.tokens, target.hidden_size, target.num_hidden_layers
    heads, latent, rope = target.num_attention_heads // step.ranks, target.kv_lora_rank, target.qk_rope_head_dim
    query_rank = target.q_lora_rank or 0
    down = linear_cost(rows, width, query_rank + latent + rope, layers)
    yield Stage("embedding", Cost(2 * _VALUE * rows * width), 1)
    norms = _times(add_norm_cost(rows, width), 2 * layers + 1)
    if query_rank:
        norms += _times(add_norm_cost(rows, query_rank, update=False), layers)
    yield Stage("norms", norms, (3 if query_rank else 2) * layers + 1, norms.bytes)
    yield Stage("q_a and kv_a", down, layers, down.bytes)
    queries = heads * (target.qk_nope_head_dim + rope)
    yield Stage("q_b", linear_cost(rows, query_rank or width, queries, layers), layers)
    inward = linear_cost(rows, target.qk_nope_head_dim, latent, layers * heads)
    outward = linear_cost(rows, latent, target.v_head_dim, layers * heads)
    yield Stage("latent projections", inward + outward, 2 * layers)
    yield Stage("norm_rope", _times(norm_rope_cost(rows, heads, latent, rope), layers), layers)
    one = verify_attention_cost(step.rows, [step.context] * step.streams, heads, latent_dim=latent, rope_dim=rope)
    keys = layers * _VALUE * step.streams * (step.context + step.rows) * (latent + rope)
    parts = layers * _attention_parts(step, heads)
    pairs = step.rows * heads
    whole_tiles = _TILE_PRICE * -(-pairs // _ATTENTION_TILE) * _ATTENTION_TILE / pairs
    yield Stage("attention", _times(one, layers), layers, keys, parts, True, whole_tiles * layers * one.flops)
    yield Stage("o_proj", linear_cost(rows, heads * target.v_head_dim, width, layers), layers)


def _attention_parts(step: Step, heads: int) -> int:
    """Into how many parts a tile's keys are cut; 0 where tiles are so many that they stay whole."""
    tiles, pages = -(-step.rows * heads // _ATTENTION_TILE), -(-(step.context + step.rows) // PAGE_SIZE)
    parts = most_parts(step.streams * tiles, pages, _MULTIPROCESSORS)
    return parts if parts > 1 else 0


def _feed_forward_stages(target: TargetConfig, step: Step) -> Iterator[Stage]:
    rows, width, picks = step.tokens, target.hidden_size, target.num_experts_per_tok
    moe = sum(target.is_moe_layer(layer) for layer in range(target.num_hidden_layers))
    dense = target.num_hidden_layers - moe
    gate = _VALUE * width * (target.n_routed_experts + rows) + 8 * rows * picks
    flops = 2 * rows * width * target.n_routed_experts
    yield Stage("router", _times(Cost(gate, flops), moe), moe, moe * gate)
    inner = target.moe_intermediate_size if step.experts == "ep" else target.moe_intermediate_size // step.ranks
    share = step.ranks if step.experts == "ep" else 1
    distinct = busiest_rank(step.distinct, step.ranks, target.n_routed_experts) if share > 1 else step.distinct
    values = 3 * width * inner
    expert = values // 2 + values // INT4_GROUP * 2 if target.experts_int4 else _VALUE * values
    moved = round(distinct * expert) + 2 * _VALUE * rows * width + 8 * rows * picks
    routed = Cost(moved, 2 * values * rows * picks // share)
    values = 3 * width * target.n_shared_experts * target.moe_intermediate_size // step.ranks
    shared = Cost(_VALUE * values, 2 * values * rows)  # added in the launch of the routed ones, whose rows it shares
    yield Stage("experts", _times(routed + shared, moe), moe)
    inner = target.intermediate_size // step.ranks
    yield Stage("dense layers", _swiglu_cost(rows, width, inner, dense), 2 * dense)


def _head_stages(target: TargetConfig, drafter: DrafterConfig | None, step: Step) -> Iterator[Stage]:
    rows, vocab = step.tokens, target.vocab_size // step.ranks
    depth = 0 if drafter is None else drafter.block_size - 1
    taps = 0 if drafter is None else len(drafter.target_layer_ids) * drafter.hidden_size
    yield Stage("lm_head", linear_cost(rows, target.hidden_size, vocab), 1)
    merged = 1 if step.ranks == 1 else 2  # launches of what stands on both sides of an exchange between ranks
    yield Stage("target_sample", Cost(rows * (_VALUE * vocab + 4)), merged)
    yield Stage("accept", tree_accept_cost(step.streams, step.rows, depth), 1)
    latent = _VALUE * (target.kv_lora_rank + target.qk_rope_head_dim)
    new = step.streams * step.committed
    moved = kv_commit_cost(target.num_hidden_layers, latent, new, _VALUE * taps, new)
    yield Stage("commit", moved, 1, moved.bytes)


def _draft_stages(target: TargetConfig, drafter: DrafterConfig, step: Step) -> Iterator[Stage]:
    layers, width, depth = drafter.num_hidden_layers, drafter.hidden_size, drafter.block_size - 1
    block, new = step.streams * drafter.block_size, step.streams * step.committed
    queries = drafter.num_attention_heads // step.ranks * drafter.head_dim
    keys = drafter.num_key_value_heads // step.ranks * drafter.head_dim
    inner, vocab = drafter.intermediate_size // step.ranks, target.vocab_size // step.ranks
    taps = len(drafter.target_layer_ids) * width
    features = linear_cost(new, taps // step.ranks, width) + linear_cost(new, width, 2 * keys * layers)
    yield Stage("draft context", features, 2)
    products = linear_cost(block, width, queries + 2 * keys, layers) + linear_cost(block, queries, width, layers)
    products += linear_cost(block, width, 2 * inner, layers) + linear_cost(block, inner, width, layers)
    norms = _times(add_norm_cost(block, width), 2 * layers + 1)
    yield Stage("draft layers", products + norms, 6 * layers + 1, norms.bytes)
    seen = sum(min(step.context, window or step.context) for window in drafter.sliding)
    rows = _VALUE * step.streams * 2 * keys * (seen + layers * drafter.block_size)
    heads = 2 * _VALUE * block * queries * layers
    pairs = block * (seen + layers * drafter.block_size)
    yield Stage("draft attention", Cost(rows + heads, 4 * queries * pairs), layers)
    logits = step.streams * depth
    yield Stage("draft head", linear_cost(logits, width, vocab), 1)
    merged = 1 if step.ranks == 1 else 2
    yield Stage("draft_topk", Cost(logits * (_VALUE * vocab + 8 * step.top_k + 1)), merged)
    yield Stage("tree_build", tree_build_cost(step.streams, depth, step.top_k, step.rows - 1), 1)
