"""The streams of a batch as the device keeps them: where each stands, and whether it still wants tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.decode.transcript import Transcript
from kdlab.tree import Acceptance, AcceptStatus

_NO_STOP = 2**30  # behind every cap, with room to add to it


class Commit(NamedTuple):
    """What a round commits of each stream; nothing of one that rests or whose round failed."""

    start: Tensor  # [S] i32, committed rows before the round
    path: Tensor  # [S, L + 1] i32, rows of the tree, root first, -1 padded
    num_rows: Tensor  # [S] i32, rows of the path


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """S streams on a device, in buffers that stay where they are.

    A stream that has its tokens, or whose round failed, stops running by itself: rounds that the host launched before
    it knew leave it as it is. When it ends is what `Transcript` says of the same tokens.

    Attributes:
        prompt: [S] i64, index of the prompt, which keys the sampling noise; -1 for an empty slot.
        start: [S] i32, committed rows.
        anchor: [S] i32, the token at position `start`, not yet run through the target.
        running: [S] bool.
        num_tokens: [S] i32, new tokens so far, the anchor included.
        cap: [S] i32, most new tokens.
        stop: [S] i32, place of the first stop token among the new tokens before the cap, or a number above every cap.
        is_stop: [V] bool, tokens that end an output.
        tail: tokens wanted past the cut.
    """

    prompt: Tensor
    start: Tensor
    anchor: Tensor
    running: Tensor
    num_tokens: Tensor
    cap: Tensor
    stop: Tensor
    is_stop: Tensor
    tail: int

    @classmethod
    def allocate(
        cls,
        num_streams: int,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        tail: int,
        device: torch.device,
    ) -> "Streams":
        """Return `num_streams` empty slots."""
        is_stop = torch.zeros(vocab_size, dtype=torch.bool)
        is_stop[list(stop_token_ids)] = True
        zeros = (torch.zeros(num_streams, dtype=torch.int32, device=device) for _ in range(5))
        start, anchor, num_tokens, cap, stop = zeros
        return cls(
            prompt=torch.full((num_streams,), -1, device=device),
            start=start,
            anchor=anchor,
            running=torch.zeros(num_streams, dtype=torch.bool, device=device),
            num_tokens=num_tokens,
            cap=cap,
            stop=stop,
            is_stop=is_stop.to(device),
            tail=tail,
        )

    def admit(self, slot: int, prompt: int, transcript: Transcript) -> None:
        """Let a prompt run in a slot from its first token on, which the transcript holds already."""
        self.prompt[slot] = prompt
        self.start[slot] = len(transcript.prompt_ids)
        self.anchor[slot] = transcript.tokens[0]
        self.num_tokens[slot] = len(transcript.tokens)
        self.cap[slot] = transcript.cap
        self.stop[slot] = _NO_STOP if transcript.stop is None else transcript.stop
        self.running[slot] = True

    def release(self, slot: int) -> None:
        """Empty a slot; `start` goes back too, as the next prompt there may be shorter than the last."""
        self.prompt[slot] = -1
        self.running[slot] = False
        self.start[slot] = 0

    def advance(self, token: Tensor, acceptance: Acceptance) -> Commit:
        """Take over what a round accepted, and rest where all tokens are there.

        A stream whose target has no token after the path, or whose tree is malformed, rests as it was.

        Args:
            token: [S, N] i32, tokens of the trees.
            acceptance: of the same trees.

        Returns:
            What there is to commit.
        """
        good = self.running & (acceptance.status == AcceptStatus.OK) & (acceptance.bonus >= 0)
        start = self.start.clone()
        path = torch.where(good[:, None], acceptance.path, -1)
        count = torch.where(good, acceptance.length + 1, 0)
        self._find_stop(_new_tokens(token, acceptance), count)
        self.start.add_(count)
        self.num_tokens.add_(count)
        self.anchor.copy_(torch.where(good, acceptance.bonus, self.anchor))
        # As in Transcript.done: no further round counts, and the tail is there.
        wants_round = self.num_tokens - 1 < torch.minimum(self.cap, self.stop)
        wants_tail = self.num_tokens < torch.minimum(self.cap, self.stop + 1) + self.tail
        self.running.copy_(good & (wants_round | wants_tail))
        return Commit(start, path, count)

    def _find_stop(self, tokens: Tensor, count: Tensor) -> None:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        index = self.num_tokens[:, None] + place
        hit = self.is_stop[tokens.long()] & (place < count[:, None]) & (index < self.cap[:, None])
        first = torch.where(hit, index, _NO_STOP).amin(dim=1)
        self.stop.copy_(torch.minimum(self.stop, first))


def _new_tokens(token: Tensor, acceptance: Acceptance) -> Tensor:
    """Return [S, L + 1]: the accepted draft tokens, then the bonus, then tokens that mean nothing."""
    path = acceptance.path.roll(-1, dims=1)  # the root's own token is an old one
    drafted = token.gather(1, path.clamp(min=0).long())
    place = torch.arange(path.shape[1], device=path.device)
    return torch.where(place == acceptance.length[:, None], acceptance.bonus[:, None], drafted).clamp(min=0)
