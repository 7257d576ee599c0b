"""How the kernels of moe_int4 are launched: one function a path, see `moe_builds.moe_path`."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.kernels import jit
from kdlab.kernels.counters import zero_counters
from kdlab.kernels.library_linear import library_linear, library_parts
from kdlab.kernels.moe_builds import (
    MANY_THREADS,
    THREADS,
    TILE_PICKS,
    WIDE_ROWS,
    Path,
    few_threads,
    most_tiles,
)
from kdlab.kernels.moe_slices import slices_bytes, slices_grid
from kdlab.kernels.side_by_side import side_by_side

_PLAN_PICKS, _PLAN_THREADS, _PLAN_TURNS, _ACTIVATE_THREADS, _SUM_THREADS, _VECTOR = 2048, 1024, 4, 256, 128, 8
"""Of the kernels moe_many_*."""
_FREE = 1
"""Multiprocessors that moe_many_experts leaves to the shared expert, whose kernels else wait for its first blocks to
end. On an H200 544 rows took 387 us with none, 382 with one or two, 388 with four; others were level with one."""
_TILE_WORDS = 4


class Routed(NamedTuple):
    """Who picks whom, and the weights of all experts."""

    ids: Tensor  # [T, k] int32
    weights: Tensor  # [T, k] float32
    gate_up: Tensor
    gate_up_scale: Tensor | None  # None: dense
    down: Tensor
    down_scale: Tensor | None

    @property
    def inner(self) -> int:
        return self.gate_up.shape[1] // 2


class Shared(NamedTuple):
    """Weights of the shared expert."""

    gate_up: Tensor  # [1, 2 I, D] as x
    down: Tensor  # [1, D, I] as x

    @property
    def inner(self) -> int:
        return self.down.shape[2]


def _run_rows(build: jit.Build, x: Tensor, routed: Routed, shared: Shared | None) -> Tensor:
    (num_rows, width), top_k = x.shape, routed.ids.shape[1]
    hidden, shared_hidden = _gate_up(build, x, routed, shared)
    slots = top_k + (shared is not None)
    out, parts = torch.empty_like(x), x.new_empty(num_rows, slots, width, dtype=torch.float32)
    beside = None if shared is None else shared.down
    inputs = (hidden, shared_hidden, routed.ids, routed.down, routed.down_scale, beside)
    _launch(build, "moe_down", _num_blocks(build, x), *inputs, parts, *_handover(build, x), num_rows, top_k, slots)
    grid = (num_rows, -(-width // (4 * THREADS)))
    _launch(build, "moe_sum", grid, parts, routed.ids, routed.weights, out, top_k, slots)
    return out


def _run_slices(up: jit.Build, down: jit.Build, x: Tensor, routed: Routed, shared: Shared | None) -> Tensor:
    num_rows, top_k = routed.ids.shape
    hidden, shared_hidden = _gate_up(up, x, routed, shared)
    out, beside = torch.empty_like(x), None if shared is None else shared.down
    inputs = (hidden, shared_hidden, routed.ids, routed.weights, routed.down, routed.down_scale, beside)
    blocks, threads = slices_grid(down)
    shared_bytes = slices_bytes(down, num_rows, top_k)
    kernel = jit.kernel(down, "moe_slices", x.device)
    kernel.launch(blocks, threads, *inputs, out, num_rows, top_k, shared_bytes=shared_bytes, overlap=True)
    return out


def _run_few(build: jit.Build, x: Tensor, routed: Routed, shared: Shared | None) -> Tensor:
    (num_rows, width), top_k = x.shape, routed.ids.shape[1]
    gate_up, down, inner = (None, None, 0) if shared is None else (*shared, shared.inner)
    out, hidden = torch.empty_like(x), x.new_empty(num_rows * (top_k * routed.inner + inner))
    up, after = (routed.gate_up, routed.gate_up_scale, gate_up), (routed.down, routed.down_scale, down)
    features = int(dict(build.defines)["DOWN_FEATURES"])
    threads = few_threads(width, features)
    sizes, blocks = (num_rows, top_k), (jit.num_sms(x.device), -(-width // features))
    _launch(build, "moe_few_gate_up", blocks[0], x, routed.ids, *up, *after, hidden, *sizes, threads=threads[0])
    picks = (routed.ids, routed.weights)
    _launch(build, "moe_few_down", blocks[1], hidden, *picks, *after, out, *sizes, threads=threads[1])
    return out


def _run_many(build: jit.Build, x: Tensor, routed: Routed, shared: Shared | None) -> Tensor:
    (num_rows, width), top_k = x.shape, routed.ids.shape[1]
    added = None
    if shared is None:
        parts = _many_parts(build, x, routed)
    else:
        products = x.new_empty(_num_shares(num_rows), num_rows, 2 * shared.inner, dtype=torch.float32)
        activated, added = x.new_empty(num_rows, shared.inner), torch.empty_like(x)
        with side_by_side(x.device) as aside:
            with aside:
                _many_shared(build, x, shared, products, activated, added)
            parts = _many_parts(build, x, routed, free=_FREE)
    out, grid = torch.empty_like(x), (num_rows, -(-width // (_SUM_THREADS * _VECTOR)))
    sums = (parts, routed.ids, routed.weights, added, out, top_k)
    _launch(build, "moe_many_sum", grid, *sums, threads=_SUM_THREADS)
    return out


def _many_parts(build: jit.Build, x: Tensor, routed: Routed, free: int = 0) -> Tensor:
    """Launch what makes the routed experts' results [T k, D] by pick; `free` multiprocessors are left to others."""
    (num_rows, width), ids, top_k = x.shape, routed.ids, routed.ids.shape[1]
    constants, num_picks, num_experts = dict(build.defines), num_rows * top_k, routed.gate_up.shape[0]
    order, units = ids.new_empty(num_picks), x.numel() // _VECTOR
    most = most_tiles(num_picks, num_experts, 8 * int(constants["TILE_EIGHTS"]))
    tiles = ids.new_empty(1 + most, _TILE_WORDS)  # their number stands before them
    hidden, parts, turned = x.new_empty(num_picks, routed.inner), x.new_empty(num_picks, width), torch.empty_like(x)
    blocks = -(-num_picks // _PLAN_PICKS) + -(-units // (_PLAN_TURNS * _PLAN_THREADS))
    inputs = (ids, order, tiles, x, turned, num_picks, units)
    _launch(build, "moe_many_plan", blocks, *inputs, threads=_PLAN_THREADS)
    matrices = (routed.gate_up, routed.gate_up_scale, routed.down, routed.down_scale)
    args = (turned, tiles, order, *matrices, hidden, parts, top_k)
    _launch(build, "moe_many_experts", jit.num_sms(x.device) - free, *args, threads=MANY_THREADS)
    return parts


def _many_shared(build: jit.Build, x: Tensor, shared: Shared, products: Tensor, activated: Tensor, out: Tensor) -> None:
    """Launch the shared expert: `out` [T, D] by way of products [shares of D, T, 2 I] f32 and activated [T, I]."""
    library_parts(x, shared.gate_up[0], len(products), out=products)
    sizes, blocks = (activated.numel(), shared.inner, len(products)), -(-activated.numel() // _ACTIVATE_THREADS)
    _launch(build, "moe_many_activate", blocks, products, activated, *sizes, threads=_ACTIVATE_THREADS)
    library_linear(activated, shared.down[0], out=out)


def _num_shares(num_rows: int) -> int:
    """Return into how many parts of its inputs the library cuts the shared expert's gate_up: as measured on an H200.

    With 512 features and K = 7168 the whole op takes 297 us at 264 rows in 8 parts and 294 in 4, 226 and 225 at 132,
    382 and 380 at 520; the product alone 15.0 us in 4 parts at 1,056 rows and 17.2 in one, 28.6 and 25.3 at 2,080.
    """
    return 4 if num_rows < WIDE_ROWS else 1


def _gate_up(build: jit.Build, x: Tensor, routed: Routed, shared: Shared | None) -> tuple[Tensor, Tensor | None]:
    """Launch moe_gate_up; return hidden [T, k, I] and the shared expert's [T, its I]."""
    (num_rows, top_k), beside = routed.ids.shape, None if shared is None else shared.gate_up
    hidden = x.new_empty(num_rows, top_k, routed.inner)
    shared_hidden = None if shared is None else x.new_empty(num_rows, shared.inner)
    outputs = (hidden, shared_hidden, *_handover(build, x), num_rows, top_k)
    weights = (routed.gate_up, routed.gate_up_scale, beside)
    _launch(build, "moe_gate_up", _num_blocks(build, x), x, routed.ids, *weights, *outputs)
    return hidden, shared_hidden


def _handover(build: jit.Build, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what blocks of moe_int4.cu hand to one another: sums, a warp's rows by TILE_PICKS, and counters."""
    constants, blocks = dict(build.defines), _num_blocks(build, rows)
    warp_sums = max(int(constants[name]) for name in ("UP_ROWS", "DOWN_ROWS")) * TILE_PICKS
    sums = rows.new_empty(blocks, THREADS // 32 * warp_sums, dtype=torch.float32)
    return sums, zero_counters(rows.device, blocks)


def _num_blocks(build: jit.Build, rows: Tensor) -> int:
    return jit.num_sms(rows.device) * int(dict(build.defines)["BLOCKS_PER_SM"])


def _launch(
    build: jit.Build, name: str, grid: int | tuple[int, int], rows: Tensor, *args: object, threads: int = THREADS
) -> None:
    kernel = jit.kernel(build, name, rows.device)
    kernel.launch(grid, threads, rows, *args, shared_bytes=dict(build.shared_bytes)[name], overlap=True)


RUN: Mapping[Path, Callable[..., Tensor]] = {
    "few": _run_few,
    "slices": _run_slices,
    "rows": _run_rows,
    "many": _run_many,
}
"""What runs each path: (its builds as `moe_path` has them, x [T, D], the routed experts, the shared one or None) to out
[T, D]."""
