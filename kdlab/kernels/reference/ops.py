"""The eight ops of the design in plain torch, and the RMSNorm that others build on."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kdlab.checks import check_int, check_shape
from kdlab.kernels.experts import ExpertWeights
from kdlab.kernels.mla import attend, cache_rows, check_pages, compute_dtype, visible_keys
from kdlab.kernels.philox import gumbel_noise

TOP_P_REACHED = 1 - 2.0**-32
"""Share of top_p that counts as reached, so that masses equal but for the order of their sum keep the same tokens."""


class TopK(NamedTuple):
    """The best K draft candidates of every draft position."""

    log_probs: Tensor  # [S, L, K] float32, nats, descending; NaN in a row that was not finite
    token_ids: Tensor  # [S, L, K] int32
    nonfinite: Tensor  # [S, L] bool, the row held NaN or +inf, or nothing above -inf


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square, then multiply by the weight.

    Args:
        x: [..., D] float.
        weight: [D] float, in x's dtype.
        eps: added to the mean square.

    Returns:
        [..., D] in x's dtype: the mean in float32 (float64 for float64), rounded to x's dtype before the weight.
    """
    wide = x.to(compute_dtype(x.dtype))
    return F.rms_norm(wide, wide.shape[-1:], None, eps).to(x.dtype) * weight


def verify_attention(
    q: Tensor, pages: Tensor, block_table: Tensor, prefix_len: Tensor, mask: Tensor, scale: float, latent_dim: int
) -> tuple[Tensor, Tensor]:
    """Attend all tree rows to the prefix and to the tree rows that the mask allows, which stand behind it in the cache.

    o[i] = sum over j of softmax_j(scale q[i].kv[j]) kv[j, :C], j over the prefix and {j : mask[i, j]}.

    Args:
        q: [S, N, H, C + R] float, absorbed and rotated.
        pages: [P, 64, C + R] float, one layer; tree row i of stream s at its row prefix_len[s] + i. Rows that nobody
            sees may hold NaN.
        block_table: [S, M] i32, pages of each stream.
        prefix_len: [S] i32.
        mask: [S, N, N] bool.
        scale: factor of the scores.
        latent_dim: C.

    Returns:
        o [S, N, H, C] in q's dtype and lse [S, N, H] f32 in nats; a row without any visible key gives 0 and -inf.

    Raises:
        ShapeError: the arguments do not fit one another.
    """
    num_heads = q.shape[2]
    sizes = check_shape("q", q, ["S", "N", "H", pages.shape[-1]])
    check_shape("mask", mask, [sizes["S"], sizes["N"], sizes["N"]])
    check_shape("block_table", block_table, [sizes["S"], "M"])
    check_shape("prefix_len", prefix_len, [sizes["S"]])
    dtype = compute_dtype(q.dtype)
    keys = visible_keys(block_table, prefix_len, mask, page_size=pages.shape[1], num_heads=num_heads, dtype=dtype)
    o, scores = attend(q, pages.flatten(0, 1)[keys.rows], keys, scale, latent_dim)
    lse = scores.logsumexp(-1).view(q.shape[:3])
    if keys.empty is not None:
        lse = lse.masked_fill(keys.empty[..., None], -torch.inf)
    return o, lse.float()


def moe_experts(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """Run each row through its k experts (SwiGLU) and add the weighted results.

    Rows are grouped by expert, so each distinct expert is read once. The size of each group is read on the host, which
    is a synchronisation on a GPU.

    Args:
        x: [T, D] float.
        expert_ids: [T, k] int.
        weights: [T, k] float.
        experts: E experts, dense or packed.

    Returns:
        [T, D] in x's dtype, summed in float32 (float64 for float64).
    """
    check_shape("weights", weights, list(expert_ids.shape))
    num_rows, top_k = expert_ids.shape
    flat = expert_ids.flatten().long()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=experts.num_experts).tolist()
    matrices = [experts.matrices(expert, x.dtype) for expert, count in enumerate(counts) if count]
    sizes = [count for count in counts if count]
    groups = x[order // top_k].split(sizes)
    gate, up = torch.cat([F.linear(g, m[0]) for g, m in zip(groups, matrices, strict=True)]).chunk(2, dim=-1)
    hidden = (F.silu(gate) * up).split(sizes)
    out = torch.cat([F.linear(h, m[1]) for h, m in zip(hidden, matrices, strict=True)])
    wide = compute_dtype(x.dtype)
    by_row = torch.empty(out.shape, dtype=wide, device=x.device).index_copy_(0, order, out.to(wide))
    return torch.bmm(weights[:, None].to(wide), by_row.view(num_rows, top_k, -1))[:, 0].to(x.dtype)


def kv_commit(pages: Tensor, block_table: Tensor, prefix_len: Tensor, path: Tensor) -> None:
    """Move the accepted rows down behind the prefix, in place, in all layers; they keep their rotation.

    A node at depth d was rotated at prefix_len + d, which is where it ends up.

    Args:
        pages: [layers, P, 64, W] float.
        block_table: [S, M] i32.
        prefix_len: [S] i32, rows before the root.
        path: [S, L + 1] i32, accepted row indices, root first, -1 padded.

    Raises:
        ArgumentError: a row that moves lies outside the block table or the pages (checked on the CPU).
    """
    check_shape("path", path, [block_table.shape[0], "L+1"])
    depth = torch.arange(path.shape[1], device=path.device)
    moved = (path >= 0) & (depth > 0)
    num_rows, first = pages.shape[1] * pages.shape[2], prefix_len.long()[:, None]
    # What does not move is written onto itself: row 0 of the stream, which is nobody's destination. Without it only the
    # host would know how many rows move, and no graph could hold this; a CPU leaves it out, as it may lie on no page.
    both = [cache_rows(block_table, torch.where(moved, first + row, 0), pages.shape[2]) for row in (path, depth)]
    source, destination = (places[moved] if pages.device.type == "cpu" else places.flatten() for places in both)
    for places in (source, destination):
        check_pages(places, num_rows)
    rows = pages.view(pages.shape[0], num_rows, pages.shape[3])
    rows[:, destination] = rows[:, source]


def draft_topk(logits: Tensor, k: int) -> TopK:
    """Best K tokens of every draft row with their log-probabilities; exact ties go to the smaller id.

    Args:
        logits: [S, L, V] any float dtype.
        k: 1 <= K <= V.

    Returns:
        TopK; a row that holds NaN or +inf, or -inf alone, is flagged and its log-probabilities are NaN.

    Raises:
        ShapeError: logits of another shape.
        ArgumentError: K is out of range.
    """
    vocab_size = check_shape("logits", logits, ("S", "L", "V"))["V"]
    k = check_int("k", k, minimum=1, maximum=vocab_size)
    nonfinite = _unusable(logits)
    values = torch.where(nonfinite[..., None], 0.0, logits.double())
    ranked, token_ids = rank_top(values, k)
    log_probs = ranked - values.logsumexp(dim=-1, keepdim=True)
    log_probs = torch.where(nonfinite[..., None], torch.nan, log_probs)
    return TopK(log_probs.float(), token_ids.int(), nonfinite)


def rank_top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of [..., V], descending, and where they stand; equal values by position.

    `topk` alone leaves open which of equal values it takes and in which order. Sorting whole rows would settle that,
    but takes several times as long.
    """
    least = values.topk(k, dim=-1).values[..., -1:]
    above, equal = values > least, values == least
    taken = above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= k - above.sum(dim=-1, keepdim=True)))
    places = taken.to(torch.uint8).topk(k, dim=-1).indices.sort(dim=-1).values
    ranked, order = values.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return ranked, places.gather(-1, order)


def target_sample(
    logits: Tensor, *, temperature: float, top_p: float, seed: int, stream: Tensor, position: Tensor
) -> Tensor:
    """Draw the target's token at every row.

    Greedy is the argmax; at temperature T > 0 it is argmax(log p / T + Gumbel noise) over the top-p set. The noise is
    keyed by (seed, stream, position, token id), so a position gets the same token whatever the tree, the batch or the
    rank that draws it. The top-p set is the smallest that reaches mass top_p at that temperature.

    Args:
        logits: [S, N, V] any float dtype.
        temperature: >= 0; 0 is greedy, exact ties go to the smaller id.
        top_p: 0 < top_p <= 1.
        seed: 0 <= seed < 2^64.
        stream: [S] int64, index of the prompt.
        position: [S, N] int64, absolute position of the token that is drawn.

    Returns:
        [S, N] int32; -1 where the row held NaN or +inf, or nothing above -inf.

    Raises:
        ShapeError: the arguments do not fit one another.
    """
    sizes = check_shape("logits", logits, ["S", "N", "V"])
    check_shape("stream", stream, [sizes["S"]])
    check_shape("position", position, [sizes["S"], sizes["N"]])
    bad = _unusable(logits)
    if temperature == 0.0:
        tokens = logits.argmax(dim=-1)
    else:
        scaled = torch.where(bad[..., None], 0.0, logits.double()) / temperature
        noise = gumbel_noise(seed, stream, position, logits.shape[-1])
        tokens = (_keep_top_p(scaled, top_p) + noise).argmax(dim=-1)
    return torch.where(bad, -1, tokens).int()


def _keep_top_p(scaled: Tensor, top_p: float) -> Tensor:
    """Put -inf outside the smallest set of tokens, taken from the most probable down, that holds mass top_p."""
    if top_p >= 1.0:
        return scaled
    ranked, token_ids = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    dropped = ranked.cumsum(dim=-1) - ranked >= top_p * TOP_P_REACHED
    return scaled.masked_fill(torch.zeros_like(dropped).scatter(-1, token_ids, dropped), -torch.inf)


def _unusable(logits: Tensor) -> Tensor:
    """[...] bool: the row of [..., V] holds NaN or +inf, or nothing above -inf."""
    top = logits.amax(dim=-1)
    return ~torch.isfinite(top)
