"""The engine: the host's loop over rounds that a device runs by itself, for every method and any number of streams.

Streams of different lengths share a batch; a stream that ends hands its slot to the next prompt, or stays in the batch
as inert rows until the others are done. Of captured rounds the host reads one's records while the next runs: it learns
one round late that a stream has ended, and the device does not wait for it.
"""

import numpy as np
import torch
from torch import Tensor

from kdlab.decode.records import RoundRecord
from kdlab.decode.round import Round, sample
from kdlab.decode.round_buffer import Mailbox
from kdlab.decode.settings import Settings
from kdlab.decode.transcript import Transcript
from kdlab.errors import ArgumentError, KdlabError
from kdlab.kernels.jit import looking_once
from kdlab.kernels.stage import span
from kdlab.model.cache import LatentCache
from kdlab.model.draft_context import DraftContext
from kdlab.model.pair import Pair
from kdlab.model.prompts import Prompt, PromptSet, prompt_token_ids
from kdlab.model.target import TargetOutput
from kdlab.model.visible_rows import VisibleRows

PREFILL_CHUNK = 512
ROUNDS_AHEAD = {"graph": 1, "eager": 0}
"""Rounds that are launched before the host reads one. To launch an eager one takes the host longer than to read."""


class Engine:
    """Decodes prompts round by round; call `step()` until `done`.

    Attributes:
        prompts: the prompts, in order.
        transcripts: one Transcript a prompt.
        round: the streams on the device, and what a round does with them.
    """

    def __init__(self, pair: Pair, prompts: PromptSet, settings: Settings) -> None:
        """Allocate caches, capture the round where `settings.graph` says so, and prefill the first streams.

        Args:
            pair: models and tokenizer.
            prompts: from `as_prompt_set`.
            settings: from `make_settings`.

        Raises:
            ArgumentError: a prompt holds an unknown token, or leaves no room in the context.
        """
        self.pair, self.prompts, self.settings = pair, prompts, settings
        self.transcripts = [self._transcript(prompt) for prompt in prompts]
        self._waiting = list(range(len(prompts)))
        rows = max(len(t.prompt_ids) + t.cap + t.tail for t in self.transcripts)
        rows += settings.method.budget + 1 + pair.depth_limit + 1
        cache = LatentCache.allocate(pair.target.config, settings.streams, rows, pair.dtype, pair.device)
        context = None if settings.method.build is None else pair.new_context(settings.streams, rows)
        self.round = Round(pair, settings, cache, context)
        if settings.graph:
            self.round.capture()
        self._ahead = ROUNDS_AHEAD["graph" if settings.graph else "eager"]
        self._mailbox = Mailbox(self.round.record.tensors, self._ahead + 1)
        self._slots: list[int | None] = [None] * settings.streams  # the prompt in each
        self.admit()

    @property
    def done(self) -> bool:
        """True when every prompt has all its tokens."""
        return not self._waiting and self.num_running == 0

    @property
    def num_running(self) -> int:
        """Streams that the host knows to want more tokens."""
        return sum(prompt is not None for prompt in self._slots)

    @property
    def num_done(self) -> int:
        """Prompts that are finished."""
        return sum(transcript.done for transcript in self.transcripts)

    @property
    def impl(self) -> str:
        """What the target's ops ran as so far, see `TargetOutput`."""
        return "+".join(sorted(self.round.impls))

    def admit(self) -> None:
        """Let waiting prompts take the free slots, as far as there are any."""
        for slot in range(len(self._slots)):
            while self._waiting and self._slots[slot] is None:
                self._admit(slot, self._waiting.pop(0))

    def restart(self) -> None:
        """Forget what was decoded; the next `admit()` begins with the first prompts again, on the same buffers."""
        while self._mailbox:
            self._mailbox.take()
        for slot in range(len(self._slots)):
            self._release(slot)
        self.transcripts = [self._transcript(prompt) for prompt in self.prompts]
        self._waiting = list(range(len(self.prompts)))

    def step(self, *, admit: bool = True) -> list[RoundRecord]:
        """Launch one round of every running stream, and read the oldest that was not read yet.

        Args:
            admit: let waiting prompts take over the slots of streams that ended.

        Returns:
            A RoundRecord of each stream that ran in the round that was read: the one launched, or of captured rounds
            the one before, so that the first step returns nothing.

        Raises:
            KdlabError: the target's logits of a round were not finite, or its tree was malformed.
        """
        self.round.run()
        self._mailbox.post()
        if len(self._mailbox) <= self._ahead:
            return []
        words, *experts = self._mailbox.take()
        fields = self.round.record.read(words.copy())
        read = (self._read(fields, slot, *experts) for slot in range(len(words)))
        records = [record for record in read if record is not None]
        for record in records:
            self.transcripts[record.prompt].add_round(record)
        for slot, prompt in enumerate(self._slots):
            if prompt is not None and self.transcripts[prompt].done:
                self._release(slot)
        if admit:
            self.admit()
        return records

    def _read(
        self, fields: dict[str, np.ndarray], slot: int, experts: np.ndarray | None = None
    ) -> RoundRecord | None:
        """Return the record of one slot, or None where no stream ran there."""
        prompt = int(fields["prompt"][slot])
        if not fields["running"][slot]:
            if prompt >= 0 and prompt == self._slots[slot]:  # it would wait for ever
                raise KdlabError(f"prompt {prompt}: its stream rests on the device before all its tokens are there")
            return None
        status = int(fields["status"][slot])
        if status or fields["bonus"][slot] < 0:
            reason = f"a malformed tree (status {status})" if status else "target logits that are not finite"
            raise KdlabError(f"prompt {prompt}, round at position {int(fields['start'][slot])}: {reason}")
        return self.round.record.record(fields, slot, len(self.transcripts[prompt].rounds), experts)

    # -- streams --------------------------------------------------------------------------------------------------

    def _transcript(self, prompt: Prompt) -> Transcript:
        settings, limit = self.settings, self.pair.target.config.max_position_embeddings
        ids = prompt_token_ids(prompt, self.pair.tokenizer)
        room = limit - len(ids)
        if room < 1:
            raise ArgumentError(f"prompt {prompt.id!r}", f"fewer than {limit} tokens, the context limit", len(ids))
        capped_by = "context" if room < settings.max_new_tokens else "length"
        cap = min(room, settings.max_new_tokens)
        return Transcript(ids, cap, capped_by, settings.stop_token_ids, settings.tail)

    def _release(self, slot: int) -> None:
        self.round.streams.release(slot)
        self._slots[slot] = None

    @torch.inference_mode()
    def _admit(self, slot: int, prompt: int) -> None:
        """Prefill a prompt into a slot and draw its first token, the first anchor; the host waits for that."""
        transcript, device, context = self.transcripts[prompt], self.pair.device, self.round.context
        output = prefill(
            self.pair,
            torch.tensor([transcript.prompt_ids], device=device),
            self.round.cache.stream(slot),
            None if context is None else context.stream(slot),
            self.settings.impl,
            self.settings.op_impl,
        )
        self.round.impls.add(output.impl)
        length = torch.tensor([[len(transcript.prompt_ids)]], device=device)
        key = torch.tensor([prompt], device=device)
        anchor = int(sample(self.pair, self.settings, output.hidden[:, -1:], key, length))
        if anchor < 0:
            raise KdlabError(f"prompt {prompt}: target logits after the prompt are not finite")
        transcript.extend([anchor])
        if not transcript.done:
            self.round.streams.admit(slot, prompt, transcript)
            self._slots[slot] = prompt


def prefill(
    pair: Pair,
    token_ids: Tensor,
    cache: LatentCache,
    context: DraftContext | None,
    impl: str = "auto",
    op_impl: str = "auto",
) -> TargetOutput:
    """Run committed tokens through the target from position 0, in chunks, filling the cache and the draft context.

    Args:
        pair: models.
        token_ids: [1, T] int, T >= 1.
        cache: of one stream, written at rows 0..T-1.
        context: of one stream, given the features of positions 0..T-1; None for AR.
        impl: of the target's ops.
        op_impl: of the drafter's.

    Returns:
        What the target returned for the last chunk.
    """
    with span("prefill"), looking_once():
        for first in range(0, token_ids.shape[1], PREFILL_CHUNK):
            chunk = token_ids[:, first : first + PREFILL_CHUNK]
            size = chunk.shape[1]
            start, count = (torch.full((1,), n, dtype=torch.int32, device=token_ids.device) for n in (first, size))
            positions = start + torch.arange(size, device=token_ids.device)[None]
            taps = () if context is None else pair.taps
            output = pair.target(chunk, positions, cache, start, VisibleRows.causal(count, size), taps=taps, impl=impl)
            if context is not None:
                pair.extend_context(context, output.taps, start, count, op_impl)
    return output
