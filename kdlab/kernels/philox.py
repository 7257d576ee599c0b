"""Philox4x32-10, the counter-based generator behind sampling: noise is a function of its key, never of call order.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Encrypt 128-bit counters under a 64-bit key.

    Args:
        counter: four int64 tensors that broadcast together, each holding 32-bit words.
        key: two 32-bit words.

    Returns:
        Four int64 tensors of the broadcast shape, each holding uniform 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # NOTE: the 64-bit product may pass 2^63; int64 wraps, so shift and mask still give the exact high word.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(seed: int, stream: Tensor, position: Tensor, num_ids: int, *, first_id: int = 0) -> Tensor:
    """Standard Gumbel noise keyed by (seed, stream, absolute position, global token id).

    A vocabulary shard asks for its own ids and gets what the whole vocabulary would have given them.

    Args:
        seed: 0 <= seed < 2^64.
        stream: [S] int64, index of the prompt.
        position: [S, N] int64, absolute position of the token to be drawn.
        num_ids: token ids first_id .. first_id + num_ids - 1 are wanted.

    Returns:
        [S, N, num_ids] float64.
    """
    first_block = first_id // 4
    blocks = torch.arange(first_block, (first_id + num_ids + 3) // 4, device=position.device)
    counter = (blocks, position[..., None] & _MASK, stream[:, None, None] & _MASK, torch.zeros_like(blocks))
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed & _MASK, seed >> 32))), dim=-1).flatten(-2)
    start = first_id - 4 * first_block
    uniform = (words[..., start : start + num_ids].double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log()
