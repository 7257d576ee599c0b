"""`round_rows` and `stream_advance` in plain torch."""

import torch
from torch import Tensor

NO_STOP = 2**30  # behind every cap, with room to add to it


def round_rows(
    token: Tensor, depth: Tensor, num_nodes: Tensor, start: Tensor, anchor: Tensor, running: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Put the anchors at the roots and place the rows; see `kdlab.kernels.round_rows` for the arguments."""
    token[:, 0] = anchor
    positions = start[:, None] + depth
    return positions, positions.long() + 1, num_nodes * running


def stream_advance(
    token: Tensor,
    path: Tensor,
    length: Tensor,
    bonus: Tensor,
    status: Tensor,
    is_stop: Tensor,
    cap: Tensor,
    start: Tensor,
    anchor: Tensor,
    running: Tensor,
    num_tokens: Tensor,
    stop: Tensor,
    tail: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take over what a round accepted, in place; see `kdlab.kernels.stream_advance` for the arguments."""
    good = (running != 0) & (status == 0) & (bonus >= 0)
    count = torch.where(good, length + 1, 0)
    place = torch.arange(path.shape[1], dtype=torch.int32, device=path.device)
    index = num_tokens[:, None] + place
    fresh = _new_tokens(token, path, length, bonus)
    known = (fresh >= 0) & (fresh < len(is_stop)) & (place < count[:, None]) & (index < cap[:, None])
    hit = known & is_stop[torch.where(known, fresh, 0).long()]
    stop.copy_(torch.minimum(stop, torch.where(hit, index, NO_STOP).amin(dim=1)))
    before = start.clone()
    start.add_(count)
    num_tokens.add_(count)
    anchor.copy_(torch.where(good, bonus, anchor))
    wants_round = num_tokens - 1 < torch.minimum(cap, stop)
    wants_tail = num_tokens < torch.minimum(cap, stop + 1) + tail
    running.copy_(good & (wants_round | wants_tail))
    return before, torch.where(good[:, None], path, -1), count


def _new_tokens(token: Tensor, path: Tensor, length: Tensor, bonus: Tensor) -> Tensor:
    """Return [S, L + 1]: the accepted draft tokens, then the bonus; -1 where a row lies outside the tree."""
    rows = path.roll(-1, dims=1)  # the root's own token is an old one
    inside = (rows >= 0) & (rows < token.shape[1])
    drafted = torch.where(inside, token.gather(1, torch.where(inside, rows, 0).long()), -1)
    place = torch.arange(path.shape[1], device=path.device)
    return torch.where(place == length[:, None], bonus[:, None], drafted)
