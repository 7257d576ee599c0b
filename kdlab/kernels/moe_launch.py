"""How the kernels of moe_int4 are launched: one function a path, see `moe_builds.moe_path`."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.config import INT4_GROUP
from kdlab.kernels import jit
from kdlab.kernels.moe_builds import (
    MANY_THREADS,
    THREADS,
    Path,
    blocks_per_sm,
    few_threads,
    most_tiles,
)
from kdlab.kernels.moe_slices import slices_build, slices_bytes, slices_grid
from kdlab.kernels.skinny_linear import skinny_linear

_PLAN_THREADS, _PLAN_PICKS, _SUM_THREADS, _SUM_FEATURES = 1024, 2048, 128, 8  # of moe_many_rows.cu
_TILE_WORDS = 4


class ExpertSet(NamedTuple):
    """Experts that share a format: the routed ones, or the shared one."""

    build: jit.Build
    ids: Tensor | None  # None: every row goes to expert 0
    gate_up: Tensor
    gate_up_scale: Tensor | None
    down: Tensor
    down_scale: Tensor | None

    @property
    def inner(self) -> int:
        return self.gate_up.shape[1] // 2


def _run_rows(x: Tensor, weights: Tensor, routed: ExpertSet, shared: ExpertSet | None) -> Tensor:
    """Launch for any number of rows; the shared expert's products are units beside those of the routed ones."""
    (num_rows, width), top_k = x.shape, weights.shape[1]
    slots = top_k + (shared is not None)
    out, parts = torch.empty_like(x), x.new_empty(num_rows, slots, width, dtype=torch.float32)
    hidden = x.new_empty(num_rows, top_k, routed.inner)
    shared_hidden = None if shared is None else x.new_empty(num_rows, shared.inner)
    _gate_up(routed, x, hidden, shared, shared_hidden)
    _down(routed, hidden, parts, shared, shared_hidden)
    grid = (num_rows, -(-width // (4 * THREADS)))
    _launch(routed.build, "moe_sum", grid, parts, routed.ids, weights, out, top_k, slots)
    return out


def _run_slices(x: Tensor, weights: Tensor, routed: ExpertSet, shared: ExpertSet | None) -> Tensor:
    """Launch for a few rows: gate_up as for any number, then one kernel for `down` and the sums over picks."""
    (num_rows, width), top_k = x.shape, weights.shape[1]
    assert routed.down_scale is not None
    sizes = (width, routed.inner, len(routed.gate_up), 0 if shared is None else shared.inner)
    build = slices_build(num_rows, top_k, x.dtype, routed.down_scale.dtype, *sizes)
    assert build is not None
    out, hidden = torch.empty_like(x), x.new_empty(num_rows, top_k, routed.inner)
    shared_hidden = None if shared is None else x.new_empty(num_rows, shared.inner)
    _gate_up(routed, x, hidden, shared, shared_hidden)
    beside = None if shared is None else shared.down
    inputs = (hidden, shared_hidden, routed.ids, weights, routed.down, routed.down_scale, beside)
    blocks, threads = slices_grid(build)
    shared_bytes = slices_bytes(build, num_rows, top_k)
    kernel = jit.kernel(build, "moe_slices", x.device)
    kernel.launch(blocks, threads, *inputs, out, num_rows, top_k, shared_bytes=shared_bytes, overlap=True)
    return out


def _run_few(x: Tensor, weights: Tensor, routed: ExpertSet, shared: ExpertSet | None) -> Tensor:
    """Launch for a few rows: two kernels, each with one block a multiprocessor, the shared expert inside."""
    (num_rows, width), top_k = x.shape, weights.shape[1]
    gate_up, down, inner = (None, None, 0) if shared is None else (shared.gate_up, shared.down, shared.inner)
    out, hidden = torch.empty_like(x), x.new_empty(num_rows * (top_k * routed.inner + inner))
    ids, build = routed.ids, routed.build
    up, after = (routed.gate_up, routed.gate_up_scale, gate_up), (routed.down, routed.down_scale, down)
    features = int(dict(build.defines)["DOWN_FEATURES"])
    threads = few_threads(width, features)
    sizes, blocks = (num_rows, top_k), (jit.num_sms(x.device), -(-width // features))
    _launch(build, "moe_few_gate_up", blocks[0], x, ids, *up, *after, hidden, *sizes, threads=threads[0])
    _launch(build, "moe_few_down", blocks[1], hidden, ids, weights, *after, out, *sizes, threads=threads[1])
    return out


def _run_many(x: Tensor, weights: Tensor, routed: ExpertSet, shared: ExpertSet | None) -> Tensor:
    """Launch for many rows: picks sorted by expert, then as products of matrices; the shared expert as a plain one."""
    (num_rows, width), top_k = x.shape, weights.shape[1]
    ids, build, num_picks = routed.ids, routed.build, num_rows * top_k
    assert ids is not None
    constants, num_experts = dict(build.defines), routed.gate_up.shape[0]
    order = ids.new_empty(num_picks)
    most = most_tiles(num_picks, num_experts, 8 * int(constants["TILE_EIGHTS"]))
    tiles = ids.new_empty(1 + most, _TILE_WORDS)  # their number stands before them
    hidden, parts, turned = x.new_empty(num_picks, routed.inner), x.new_empty(num_picks, width), torch.empty_like(x)
    added = None
    if shared is not None:
        added = skinny_linear(skinny_linear(x, shared.gate_up[0], gated=True), shared.down[0])
    groups = x.numel() // INT4_GROUP
    blocks = -(-num_picks // _PLAN_PICKS) + -(-groups // _PLAN_THREADS)
    _launch(build, "moe_many_plan", blocks, ids, order, tiles, x, turned, num_picks, groups, threads=_PLAN_THREADS)
    matrices = (routed.gate_up, routed.gate_up_scale, routed.down, routed.down_scale)
    args = (turned, tiles, order, *matrices, hidden, parts, top_k)
    _launch(build, "moe_many_experts", jit.num_sms(x.device), *args, threads=MANY_THREADS)
    out, grid = torch.empty_like(x), (num_rows, -(-width // (_SUM_THREADS * _SUM_FEATURES)))
    _launch(build, "moe_many_sum", grid, parts, ids, weights, added, out, top_k, threads=_SUM_THREADS)
    return out


def _gate_up(
    one: ExpertSet, x: Tensor, hidden: Tensor, shared: ExpertSet | None = None, shared_hidden: Tensor | None = None
) -> None:
    beside = None if shared is None else shared.gate_up
    args = (x, one.ids, one.gate_up, one.gate_up_scale, beside, hidden, shared_hidden, *hidden.shape[:2])
    _launch(one.build, "moe_gate_up", _num_blocks(x), *args)


def _down(
    one: ExpertSet, hidden: Tensor, parts: Tensor, shared: ExpertSet | None = None, shared_hidden: Tensor | None = None
) -> None:
    beside = None if shared is None else shared.down
    args = (hidden, shared_hidden, one.ids, one.down, one.down_scale, beside, parts, *hidden.shape[:2], parts.shape[1])
    _launch(one.build, "moe_down", _num_blocks(hidden), *args)


def _num_blocks(rows: Tensor) -> int:
    return jit.num_sms(rows.device) * blocks_per_sm(rows.dtype)


def _launch(
    build: jit.Build, name: str, grid: int | tuple[int, int], rows: Tensor, *args: object, threads: int = THREADS
) -> None:
    kernel = jit.kernel(build, name, rows.device)
    kernel.launch(grid, threads, rows, *args, shared_bytes=dict(build.shared_bytes)[name], overlap=True)


RUN: Mapping[Path, Callable[[Tensor, Tensor, ExpertSet, ExpertSet | None], Tensor]] = {
    "few": _run_few,
    "slices": _run_slices,
    "rows": _run_rows,
    "many": _run_many,
}
"""What runs each path: (x [T, D], weights [T, k] float32, the routed experts, the shared one or None) to out [T, D]."""
