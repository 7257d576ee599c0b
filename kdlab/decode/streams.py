"""The streams of a batch as the device keeps them: where each stands, and whether it still wants tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kdlab.decode.transcript import Transcript
from kdlab.kernels.stream_advance import NO_STOP, Advance, stream_advance
from kdlab.tree import Acceptance


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """S streams on a device, in buffers that stay where they are.

    A stream that has its tokens, or whose round failed, stops running by itself: rounds that the host launched before
    it knew leave it as it is. When it ends is what `Transcript` says of the same tokens.

    Attributes:
        prompt: [S] i64, index of the prompt, which keys the sampling noise; -1 for an empty slot.
        start: [S] i32, committed rows.
        anchor: [S] i32, the token at position `start`, not yet run through the target.
        running: [S] i32, 1, or 0 for a stream at rest.
        num_tokens: [S] i32, new tokens so far, the anchor included.
        cap: [S] i32, most new tokens.
        stop: [S] i32, place of the first stop token among the new tokens before the cap, or NO_STOP.
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
        zeros = (torch.zeros(num_streams, dtype=torch.int32, device=device) for _ in range(6))
        start, anchor, running, num_tokens, cap, stop = zeros
        return cls(
            prompt=torch.full((num_streams,), -1, device=device),
            start=start,
            anchor=anchor,
            running=running,
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
        self.stop[slot] = NO_STOP if transcript.stop is None else transcript.stop
        self.running[slot] = 1

    def release(self, slot: int) -> None:
        """Empty a slot; `start` goes back too, as the next prompt there may be shorter than the last."""
        self.prompt[slot] = -1
        self.running[slot] = 0
        self.start[slot] = 0

    def advance(self, token: Tensor, acceptance: Acceptance, impl: str = "auto") -> Advance:
        """Take over what a round accepted, and rest where all tokens are there; see `stream_advance`.

        Args:
            token: [S, N] i32, tokens of the trees.
            acceptance: of the same trees.
            impl: of the op.

        Returns:
            What there is to commit.
        """
        return stream_advance(
            token,
            acceptance.path,
            acceptance.length,
            acceptance.bonus,
            acceptance.status,
            is_stop=self.is_stop,
            cap=self.cap,
            start=self.start,
            anchor=self.anchor,
            running=self.running,
            num_tokens=self.num_tokens,
            stop=self.stop,
            tail=self.tail,
            impl=impl,
        )
