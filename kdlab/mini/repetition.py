"""Teaches the target not to fall into loops: it is shown its own greedy text, and tokens that loop are made unlikely.

Small models repeat themselves when decoded greedily, and a loop flatters a drafter, as it accepts everything. The loss
is that of unlikelihood training (Welleck et al., 2019) on the tokens that complete a run of eight seen before.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

RUN = 8  # tokens; a longer loop repeats every run of it


def repeats(tokens: Tensor, own: Tensor) -> Tensor:
    """Mark the tokens that complete a run of eight that the same stream wrote before.

    Args:
        tokens: [S, T] int.
        own: [S, T] bool, the tokens to look at; runs that hold others do not count.

    Returns:
        [S, T] bool.
    """
    ids = tokens.long() + 1
    runs = torch.zeros_like(ids)
    whole = torch.ones_like(own)
    for back in range(RUN):
        # Overflow wraps, which is what a rolling hash wants.
        runs = runs * 1_000_003 + torch.roll(ids, back, dims=1)
        whole = whole & torch.roll(own, back, dims=1)
    whole[:, : RUN - 1] = False
    same = (runs[:, :, None] == runs[:, None, :]) & whole[:, :, None] & whole[:, None, :]
    return same.tril(-1).any(-1)


def unlikelihood(logits: Tensor, tokens: Tensor, marked: Tensor) -> Tensor:
    """Return the mean of -log(1 - p) over the marked tokens, 0 where none is marked.

    Args:
        logits: [S, T, V] float, row t predicts token t + 1.
        tokens: [S, T] int.
        marked: [S, T] bool.
    """
    log_prob = -F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten().long(), reduction="none")
    # 1 - p of a sure token would be zero, and its gradient would not be finite.
    penalty = -torch.log1p(-log_prob.exp().clamp_max(1 - 1e-4))
    weight = marked[:, 1:].flatten().float()
    return (penalty * weight).sum() / weight.sum().clamp_min(1)
