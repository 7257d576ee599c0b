"""target_sample: the target's token at every row, greedy or drawn; whole vocabulary. `sample_shards` has the shards."""

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_float, check_int, check_shape
from kdlab.errors import ShapeError
from kdlab.kernels import jit, reference
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.logits import DTYPES, THREADS, cluster_size, constants, count_chunks, runs_kernel

__all__ = ["MAX_CANDIDATES", "check_sampling", "launch", "target_sample", "target_sample_cost"]

MAX_CANDIDATES = 64  # as in top_p_mass.cu
MIN_TEMPERATURE = 1e-30  # below, float64 itself has no room for logit / T
_LOG2_E = 1.4426950408889634
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_FILES = {"target_greedy": "target_sample.cu", "target_draw": "target_sample.cu", "top_p_mass": "top_p_mass.cu"}


def _build(kernel: str, dtype: torch.dtype) -> jit.Build:
    return jit.Build(_FILES[kernel], constants(dtype))


BUILDS = tuple(dict.fromkeys(_build(kernel, dtype) for kernel in _FILES for dtype in DTYPES))


def target_sample(
    logits: Tensor,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    stream: Tensor,
    position: Tensor,
    impl: str = "auto",
) -> Tensor:
    """Draw the target's token at every row: the same on CPU and GPU, in every batch and on any number of shards.

    Greedy is the argmax; at temperature T > 0 it is argmax(log p / T + Gumbel noise) over the top-p set, the noise
    keyed by (seed, stream, position, token id).

    Args:
        logits: [S, N, V] any float dtype; on a GPU float32, bfloat16 or float16, the values of a row side by side.
        temperature: >= 0; 0 is greedy, exact ties go to the smaller id. On a GPU 0 or at least 1e-30.
        top_p: 0 < top_p <= 1, at that temperature.
        seed: 0 <= seed < 2^64.
        stream: [S] int64, index of the prompt.
        position: [S, N] int64, absolute position of the token that is drawn.
        impl: "auto" (the kernel for CUDA tensors), "cuda" or "reference".

    Returns:
        [S, N] int32; -1 where the row held NaN or +inf, or nothing above -inf.

    Raises:
        ShapeError: the arguments do not fit one another, or the kernel cannot read them.
        ArgumentError: a value out of range, an unknown impl. UnsupportedDevice: "cuda" for tensors on another device.
    """
    check_sampling(logits, temperature, top_p, seed, stream, position)
    if not runs_kernel("target_sample", logits, impl):
        return reference.target_sample(
            logits, temperature=temperature, top_p=top_p, seed=seed, stream=stream, position=position
        )
    return _target_sample(logits, temperature, top_p, as_signed(seed), stream, position)


def target_sample_cost(streams: int, rows: int, vocab: int, *, dtype: torch.dtype) -> Cost:
    """Return the cost of `streams` times `rows` rows: every logit read once, a token written."""
    return Cost(streams * rows * (vocab * dtype.itemsize + 4))


def check_sampling(
    logits: Tensor, temperature: float, top_p: float, seed: int, stream: Tensor, position: Tensor
) -> None:
    """Raise ArgumentError or ShapeError unless these are arguments of `target_sample`."""
    sizes = check_shape("logits", logits, ["S", "N", "V"])
    check_int("V of logits", sizes["V"], minimum=1)
    check_shape("stream", stream, [sizes["S"]])
    check_shape("position", position, [sizes["S"], sizes["N"]])
    check_float("temperature", temperature, minimum=0.0)
    check_float("top_p", top_p, above=0.0, maximum=1.0)
    check_int("seed", seed, minimum=0, maximum=2**64 - 1)
    for name, tensor in (("stream", stream), ("position", position)):
        if tensor.dtype != torch.int64 or tensor.device != logits.device:
            raise ShapeError(name, f"int64 on {logits.device}", f"{tensor.dtype} on {tensor.device}")


def as_signed(seed: int) -> int:
    """Return the 64 bits of a seed as the signed integer that a custom op can take."""
    return seed - 2**64 if seed >= 2**63 else seed


def launch(name: str, logits: Tensor, num_ids: int, first_id: int, *args: object) -> None:
    """Launch one of the sampling kernels over all rows; `args` follow what all of them take."""
    num_rows = logits.shape[0] * logits.shape[1]
    if num_rows == 0:
        return
    kernel = jit.kernel(_build(name, logits.dtype), name, logits.device)
    chunks = count_chunks(num_ids + first_id % 4, logits.element_size())
    cluster = cluster_size(kernel, num_rows, chunks, lambda _: 0)
    strides = np.int64(logits.stride(0)), np.int64(logits.stride(1))
    rows = (logits, *strides, logits.shape[1], num_ids, first_id, cluster)
    kernel.launch(
        num_rows * cluster, THREADS, *rows, *args, cluster=cluster if cluster > 1 else None, overlap=True
    )


def noise_arguments(
    temperature: float, top_p: float, seed: int, stream: Tensor, position: Tensor
) -> tuple[object, ...]:
    """Return what `target_draw` takes to make noise: its float32 factor never overflows, so 0 times it is 0.

    Raises:
        ArgumentError: a temperature below MIN_TEMPERATURE.
    """
    check_float("temperature", temperature, minimum=MIN_TEMPERATURE)
    log2_scale = min(max(_LOG2_E / temperature, _SMALLEST), _LARGEST)
    key = stream.contiguous(), position.contiguous(), np.uint64(seed % 2**64)
    return *key, np.float64(temperature), np.float64(top_p), np.float32(log2_scale)


@cuda_op("target_sample")
def _target_sample(
    logits: Tensor, temperature: float, top_p: float, seed: int, stream: Tensor, position: Tensor
) -> Tensor:
    tokens = torch.empty(logits.shape[:2], dtype=torch.int32, device=logits.device)
    if temperature == 0.0:
        launch("target_greedy", logits, logits.shape[2], 0, tokens, None, None, None)
    else:
        noise = noise_arguments(temperature, top_p, seed, stream, position)
        launch("target_draw", logits, logits.shape[2], 0, *noise, tokens, None, None, None, 0)
    return tokens


@_target_sample.register_fake
def _(logits: Tensor, temperature: float, top_p: float, seed: int, stream: Tensor, position: Tensor) -> Tensor:
    return torch.empty(logits.shape[:2], dtype=torch.int32, device=logits.device)
