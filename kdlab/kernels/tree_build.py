"""tree_build: from the draft's candidates to the best draft trees of a node budget, every array in one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.checks import MAX_TOKEN, check_int, check_integer_tensor, check_shape
from kdlab.errors import NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.ancestors import num_words
from kdlab.kernels.constants import DTYPE_DEFINE
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.ops import cuda_op

MAX_TREE_DEPTH, MAX_TREE_WIDTH, MAX_TREE_BUDGET = 31, 256, 1024
_BINS = 256
_COMMON_BYTES = 1280
_MAX_SHARED_BYTES = 99 * 1024  # of a block on sm_89 and sm_120

_FINE_BUDGET = 257  # from here on bins are cut finely: 24 us instead of 37 at 1,024; below it costs 0.2 us
BUILDS = tuple(
    jit.Build("tree_build.cu", (("FINE", fine),), shared_bytes=(("tree_build", _MAX_SHARED_BYTES),)) for fine in (0, 1)
)


class TreeArrays(NamedTuple):
    """The arrays of S draft trees of N = budget + 1 rows, as `kdlab.tree.DraftTree` explains them."""

    token: Tensor  # [S, N] i32
    parent: Tensor  # [S, N] i32
    depth: Tensor  # [S, N] i32
    logp: Tensor  # [S, N] f32, nats
    rank: Tensor  # [S, N] i32
    num_nodes: Tensor  # [S] i32
    ancestors: Tensor  # [S, N, ceil(N/32)] uint32
    first_child: Tensor  # [S, N] i32
    next_sibling: Tensor  # [S, N] i32
    missed_mass: Tensor  # [S, L] f32
    truncated: Tensor  # [S] bool
    nonfinite_rows: Tensor  # [S] i32


def tree_build(log_probs: Tensor, token_ids: Tensor, budget: int, *, vocab_size: int | None = None) -> TreeArrays:
    """Build, in every stream, the tree of the `budget` best nodes, as `kdlab.tree.build_best_first` does on the CPU.

    Nothing that depends on a value can be raised without a synchronisation: where the CPU's builder refuses a row for
    a log-probability above 0 or an id out of range, the row counts in `nonfinite_rows` and the tree ends above it; ids
    that repeat within a row become siblings with the same token, which acceptance reports.

    Args:
        log_probs: [S, L, K] float32, float16 or bfloat16, nats, on a GPU; rows in any order, equal entries keep theirs.
        token_ids: [S, L, K] int.
        budget: nodes without the root.
        vocab_size: as for `build_best_first`.

    Returns:
        TreeArrays of N = budget + 1 rows.

    Raises:
        ShapeError: the arguments do not fit one another.
        ArgumentError: `budget` or `vocab_size` is no count.
        NotSupported: more than 31 depths, 256 candidates or 1,024 nodes, or float64.
        UnsupportedDevice: no GPU that kdlab compiles for.
    """
    budget = check_int("budget", budget, minimum=0)
    _check(log_probs, token_ids, budget)
    if vocab_size is None:
        last_id, whole = MAX_TOKEN, -1
    else:
        last_id = min(check_int("vocab_size", vocab_size, minimum=1) - 1, MAX_TOKEN)
        whole = int(log_probs.shape[2] > last_id)
    ids = _as_int32(token_ids).contiguous()
    tree = TreeArrays(*_tree_build(log_probs.float().contiguous(), ids, budget, last_id, whole))
    return tree._replace(ancestors=tree.ancestors.view(torch.uint32))


def _check(log_probs: Tensor, token_ids: Tensor, budget: int) -> None:
    check_shape("log_probs", log_probs, ["S", "L", "K"])
    check_shape("token_ids", token_ids, list(log_probs.shape))
    check_integer_tensor("token_ids", token_ids)
    if not log_probs.is_floating_point():
        raise ShapeError("log_probs", "a float dtype", log_probs.dtype)
    if not log_probs.is_cuda:
        raise UnsupportedDevice(f"tree_build: the kernel needs CUDA tensors, log_probs are on {log_probs.device}")
    if token_ids.device != log_probs.device:
        raise ShapeError("token_ids", f"on {log_probs.device}", token_ids.device)
    if not tree_build_fits(log_probs, budget):
        raise NotSupported(
            "log_probs",
            f"up to {MAX_TREE_DEPTH} depths, {MAX_TREE_WIDTH} candidates and {MAX_TREE_BUDGET} nodes, 32 bits at most",
            f"{list(log_probs.shape)} {log_probs.dtype} with budget {budget}",
        )


def tree_build_fits(log_probs: Tensor, budget: int) -> bool:
    """Return whether the kernel takes candidates [S, L, K] of this shape and dtype with this budget."""
    _, depths, width = log_probs.shape
    return _is_small(depths, width, budget) and log_probs.dtype in DTYPE_DEFINE


def tree_build_impl(num_depths: int, width: int, budget: int, device: torch.device) -> str:
    """Return what `build_best_first` runs as when left to choose: "cuda", or "reference", the heap on the host.

    Args:
        num_depths: L.
        width: K.
        budget: nodes without the root.
        device: of the candidates, which have 32 bits at most.
    """
    return "cuda" if device.type == "cuda" and _is_small(num_depths, width, budget) else "reference"


def _is_small(num_depths: int, width: int, budget: int) -> bool:
    return num_depths <= MAX_TREE_DEPTH and width <= MAX_TREE_WIDTH and budget <= MAX_TREE_BUDGET


def tree_build_cost(num_streams: int, num_depths: int, width: int, budget: int) -> Cost:
    """Return the cost of reading S x L x K candidates and writing trees of `budget` nodes."""
    rows = budget + 1
    tree = rows * (7 * 4 + 4 * num_words(rows)) + 4 * num_depths + 9
    return Cost(num_streams * (8 * num_depths * width + tree))


def _as_int32(token_ids: Tensor) -> Tensor:
    """Return the ids as int32, those that do not fit as -1, which the kernel refuses."""
    if token_ids.dtype == torch.int32:
        return token_ids
    wide = token_ids.long()
    return wide.masked_fill((wide < 0) | (wide > MAX_TOKEN), -1).int()


def _num_threads(budget: int) -> int:
    """Return the threads of a block: one a row at least; more shorten the sort and the writing of large trees."""
    return next(threads for threads in (512, 1024) if threads >= min(2 * budget, 1024))


def _capacity(num_depths: int, width: int, budget: int) -> int:
    """Return the entries of the pool: the more, the less often it must be cut; the sort takes three a thread."""
    threads = _num_threads(budget)
    sizes = (3 * threads, 2 * threads)
    return next(size for size in sizes if _shared_bytes(size, num_depths, width, budget) <= _MAX_SHARED_BYTES)


def _shared_bytes(capacity: int, num_depths: int, width: int, budget: int) -> int:
    """Return the dynamic shared memory of a block, `Common` and `Plan` in the .cuh."""
    return _COMMON_BYTES + 26 * capacity + 8 * _BINS + 5 * max(num_depths * width, 1) + 2 * (budget + 1)


@cuda_op("tree_build")
def _tree_build(log_probs: Tensor, token_ids: Tensor, budget: int, last_id: int, whole: int) -> list[Tensor]:
    arrays = _new_arrays(log_probs, budget)
    streams, depths, width = log_probs.shape
    if streams:
        capacity = _capacity(depths, width, budget)
        kernel = jit.kernel(BUILDS[budget >= _FINE_BUDGET], "tree_build", log_probs.device)
        kernel.launch(
            streams,
            _num_threads(budget),
            log_probs,
            token_ids,
            *arrays,
            *(depths, width, budget, capacity, last_id, whole),
            shared_bytes=_shared_bytes(capacity, depths, width, budget),
            overlap=True,
        )
    return arrays


@_tree_build.register_fake
def _(log_probs: Tensor, token_ids: Tensor, budget: int, last_id: int, whole: int) -> list[Tensor]:
    return _new_arrays(log_probs, budget)


def _new_arrays(log_probs: Tensor, budget: int) -> list[Tensor]:
    """Return what a TreeArrays holds, not filled; the ancestors as int32."""
    streams, depths, _ = log_probs.shape
    rows = budget + 1
    kinds = {
        "logp": ((streams, rows), torch.float32),
        "ancestors": ((streams, rows, num_words(rows)), torch.int32),
        "num_nodes": ((streams,), torch.int32),
        "missed_mass": ((streams, depths), torch.float32),
        "truncated": ((streams,), torch.bool),
        "nonfinite_rows": ((streams,), torch.int32),
    }
    made = (kinds.get(name, ((streams, rows), torch.int32)) for name in TreeArrays._fields)
    return [log_probs.new_empty(shape, dtype=dtype) for shape, dtype in made]
