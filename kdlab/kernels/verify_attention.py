"""Attention of all rows of a draft tree over the latent cache (MLA, absorbed form), with the ancestor mask.

Which kernel runs is one readable choice, `choose_impl`; what the op computes is `reference.verify_attention`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_float, check_int, check_integer_tensor, check_shape
from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import reference
from kdlab.kernels.ancestors import num_words, unpack_ancestors
from kdlab.kernels.constants import PAGE_SIZE
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit import HOPPER, PORTABLE, arch_of
from kdlab.kernels.jit.layouts import by_layout
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.verify_attention_flashmla import run_flashmla
from kdlab.kernels.verify_attention_mma import run_mma
from kdlab.kernels.verify_attention_naive import run_naive
from kdlab.kernels.verify_attention_wgmma import run_wgmma

IMPLS = ("auto", "reference", "naive", "mma", "wgmma", "flashmla")
_MAX_PAGES = 2**24  # of a stream: keys are counted in 31 bits
_ALIGNMENT = 16  # of what the kernels copy at once
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LATENT_DIM, ROPE_DIM = 512, 64
"""C and R of the tensor-core kernels: the latent cache of DeepSeek V3 and of Kimi K2.6."""

Launch = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, bool, Tensor, Tensor], None]
_LAUNCH: dict[str, Launch] = {"naive": run_naive, "mma": run_mma, "wgmma": run_wgmma, "flashmla": run_flashmla}


def verify_attention(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    *,
    scale: float,
    latent_dim: int,
    impl: str = "auto",
    fixed_split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend every tree row to the prefix and to its ancestors, whose keys already stand behind the prefix.

    Args:
        q: [S, N, H, C + R] f32, bf16 or f16, absorbed and rotated; rows from num_nodes on are not read.
        pages: [P, 64, C + R] in q's dtype, one layer; row i of stream s at its row prefix_len[s] + i.
        block_table: [S, M] i32, pages of each stream. On a GPU keys of a page that is none of the P count as zeros
            (impl="flashmla": it takes the nearest page that there is).
        prefix_len: [S] i32, committed rows, 0 allowed; on a GPU lengths are cut to what the block table holds.
        ancestors: [S, N, ceil(N / 32)] u32, row i sees row j where bit j is set; parents stand before children, so no
            row sees rows behind itself. Every used row has its own bit set.
        num_nodes: [S] i32, used rows; 0 for a stream that takes no part.
        scale: factor of the scores.
        latent_dim: C, values of a key that are its value too.
        impl: "auto" is `choose_impl`'s choice; "reference", "naive", "mma", "wgmma" or "flashmla" run or raise.
        fixed_split: a row's bits depend on its own prefix alone, never on what else is in the batch.

    Returns:
        o [S, N, H, C] in q's dtype and lse [S, N, H] f32 in nats; 0 and -inf where a row is unused or sees no key.

    Raises:
        ShapeError: the arguments do not fit one another. ArgumentError: a bad value (lengths are looked at on the CPU
        only). UnsupportedDevice: this machine cannot run `impl`. NotSupported: `impl` lacks the dtype, the widths or
        fixed_split.
    """
    scale = check_float("scale", scale, above=0.0)
    arguments = (q, pages, block_table, prefix_len, ancestors, num_nodes)
    impl = _impl_for(*arguments, latent_dim, impl)
    if impl == "reference":
        return _reference(*arguments, scale, latent_dim)
    return _op(*arguments, scale, latent_dim, impl, fixed_split)


@by_layout
def _impl_for(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    latent_dim: int,
    impl: str,
) -> str:
    """Check the arguments of `verify_attention`; return what runs."""
    check_choice("impl", impl, IMPLS)
    _check_tensors(q, pages, block_table, prefix_len, ancestors, num_nodes)
    latent_dim = check_int("latent_dim", latent_dim, minimum=1, maximum=q.shape[-1])
    if impl == "auto":
        arch = arch_of(q.device) if q.device.type == "cuda" else None
        impl = choose_impl(arch, q.dtype, latent_dim, q.shape[-1] - latent_dim)
    if impl == "reference":
        return impl
    if q.device.type != "cuda":
        raise UnsupportedDevice(f"verify_attention: impl={impl!r} needs a CUDA GPU, q is on {q.device}")
    if impl != "naive" and (latent_dim, q.shape[-1] - latent_dim) != (LATENT_DIM, ROPE_DIM):
        got = f"{latent_dim} and {q.shape[-1] - latent_dim}"
        raise NotSupported("latent_dim", f"widths {LATENT_DIM} and {ROPE_DIM} for impl={impl!r}", got)
    return impl


def choose_impl(arch: str | None, dtype: torch.dtype, latent_dim: int, rope_dim: int) -> str:
    """Return what "auto" runs, with fixed_split or without.

    Args:
        arch: of the GPU, "sm_90a"; None on the CPU.
        dtype: of q and pages.
        latent_dim, rope_dim: C and R.
    """
    if dtype not in (torch.bfloat16, torch.float16) or (latent_dim, rope_dim) != (LATENT_DIM, ROPE_DIM):
        return "reference"
    if arch in HOPPER:
        return "wgmma"
    return "mma" if arch in PORTABLE else "reference"


def verify_attention_cost(
    num_rows: int,
    prefix_lens: Sequence[int],
    num_heads: int,
    *,
    latent_dim: int = LATENT_DIM,
    rope_dim: int = ROPE_DIM,
    itemsize: int = 2,
) -> Cost:
    """Return the least work of one call: every key, query and output once, every query on the prefix and half the tree.

    Args:
        num_rows: N, all used.
        prefix_lens: prefix of each stream.
        num_heads: H.
        latent_dim, rope_dim: C and R.
        itemsize: bytes of a value.
    """
    width, rows = latent_dim + rope_dim, num_rows * num_heads
    moved, flops = 0, 0
    for prefix in prefix_lens:
        moved += itemsize * ((prefix + num_rows) * width + rows * (width + latent_dim)) + 4 * rows
        flops += 2 * rows * (prefix + (num_rows + 1) // 2) * (width + latent_dim)
    return Cost(moved, flops)


def _check_tensors(
    q: Tensor, pages: Tensor, block_table: Tensor, prefix_len: Tensor, ancestors: Tensor, num_nodes: Tensor
) -> None:
    sizes = check_shape("q", q, ["S", "N", "H", "C+R"])
    if q.dtype not in _FLOATS:
        raise ShapeError("q", "a float dtype", q.dtype)
    if 0 in q.shape:
        raise ShapeError("q", "no empty dimension", list(q.shape))
    if check_shape("pages", pages, ["P", PAGE_SIZE, sizes["C+R"]])["P"] == 0:
        raise ShapeError("pages", "at least one page", list(pages.shape))
    if pages.dtype != q.dtype:
        raise ShapeError("pages", f"q's dtype {q.dtype}", pages.dtype)
    if not 1 <= check_shape("block_table", block_table, [sizes["S"], "M"])["M"] <= _MAX_PAGES:
        raise ShapeError("block_table", f"1 to {_MAX_PAGES} pages a stream", list(block_table.shape))
    check_shape("ancestors", ancestors, [sizes["S"], sizes["N"], num_words(sizes["N"])])
    if ancestors.dtype != torch.uint32:
        raise ShapeError("ancestors", "uint32 words", ancestors.dtype)
    for name, tensor, most in (("prefix_len", prefix_len, None), ("num_nodes", num_nodes, sizes["N"])):
        check_shape(name, tensor, [sizes["S"]])
        check_integer_tensor(name, tensor)
        if tensor.device.type == "cpu":
            check_int(name, int(tensor.min()), minimum=0)
            check_int(name, int(tensor.max()), maximum=most)
    others = {"block_table": block_table, "prefix_len": prefix_len, "num_nodes": num_nodes}
    for name, tensor in others.items():
        check_integer_tensor(name, tensor)
        if tensor.dtype != torch.int32 and q.is_cuda:
            raise ShapeError(name, "int32", tensor.dtype)
    for name, tensor in {"q": q, "pages": pages, "ancestors": ancestors, **others}.items():
        if tensor.device != q.device:
            raise ShapeError(name, f"q's device {q.device}", tensor.device)
        if q.is_cuda and not tensor.is_contiguous():  # a copy of the cache would go unseen, but not for nothing
            raise ShapeError(name, "a contiguous tensor on a GPU", f"strides {list(tensor.stride())}")


def _reference(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    scale: float,
    latent_dim: int,
) -> tuple[Tensor, Tensor]:
    pages, block_table = _existing_pages(pages, block_table, prefix_len, num_nodes)
    rows = torch.arange(q.shape[1], device=q.device)
    used = rows < num_nodes[:, None]
    mask = unpack_ancestors(ancestors) & used[:, :, None] & used[:, None]
    queries = q.masked_fill(~used[..., None, None], 0)
    o, lse = reference.verify_attention(queries, pages, block_table, prefix_len, mask, scale, latent_dim)
    return o.masked_fill_(~used[..., None, None], 0), lse.masked_fill_(~used[..., None], -torch.inf)


def _existing_pages(pages: Tensor, block_table: Tensor, prefix_len: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return pages and a table that names only pages that exist; ArgumentError for a used one that does not (CPU)."""
    exists = (block_table >= 0) & (block_table < pages.shape[0])
    if pages.is_cuda:  # zeros in place of a missing page, without asking the host
        own = pages[block_table.clamp(0, pages.shape[0] - 1)].masked_fill(~exists[..., None, None], 0)
        return own.flatten(0, 1), torch.arange(block_table.numel(), device=pages.device).view(block_table.shape)
    length = (prefix_len.long() + num_nodes).masked_fill(num_nodes == 0, 0)
    missing = ~exists & (torch.arange(block_table.shape[1]) * PAGE_SIZE < length[:, None])
    if missing.any():
        raise ArgumentError("block_table", f"pages 0 to {pages.shape[0] - 1}", int(block_table[missing][0]))
    return pages, block_table.masked_fill(~exists, 0)


@cuda_op("verify_attention")
def _op(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    scale: float,
    latent_dim: int,
    impl: str,
    fixed_split: bool,
) -> tuple[Tensor, Tensor]:
    for name, tensor in (("q", q), ("pages", pages)):
        if tensor.data_ptr() % _ALIGNMENT and impl != "naive":
            raise ShapeError(name, f"data at a multiple of {_ALIGNMENT} bytes", hex(tensor.data_ptr()))
    o = q.new_empty([*q.shape[:3], latent_dim])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launch = _LAUNCH[impl]
    launch(q, pages, block_table, prefix_len, ancestors, num_nodes, scale, fixed_split, o, lse)
    return o, lse


@_op.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    latent_dim = others[6]
    return q.new_empty([*q.shape[:3], latent_dim]), q.new_empty(q.shape[:3], dtype=torch.float32)
