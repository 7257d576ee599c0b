"""The round engine: draft, build, verify, accept, commit, for every method and any number of streams.

AR is a tree of the root alone, a chain is a tree of one path. Streams of different lengths share a batch; a stream that
ends hands its slot to the next prompt, or stays in the batch as inert rows until the others are done.
"""

import torch
from torch import Tensor

from kdlab.decode.records import RoundRecord
from kdlab.decode.settings import Settings
from kdlab.decode.transcript import Transcript
from kdlab.errors import ArgumentError, KdlabError
from kdlab.kernels.draft_topk import MAX_K, draft_topk
from kdlab.kernels.target_sample import target_sample
from kdlab.model.cache import LatentCache
from kdlab.model.draft_context import DraftContext
from kdlab.model.pair import Pair
from kdlab.model.prompts import Prompt, PromptSet, prompt_token_ids
from kdlab.model.target import TargetOutput
from kdlab.model.visible_rows import VisibleRows
from kdlab.tree import Acceptance, DraftTree, accept, build_root_only

PREFILL_CHUNK = 512


class Engine:
    """Decodes prompts round by round; `step()` runs one round of every stream until `done`.

    Attributes:
        prompts: the prompts, in order.
        transcripts: one Transcript a prompt.
    """

    def __init__(self, pair: Pair, prompts: PromptSet, settings: Settings) -> None:
        """Allocate caches and prefill the first streams.

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
        self._cache = LatentCache.allocate(pair.target.config, settings.streams, rows, pair.dtype, pair.device)
        self._context = None if settings.method.build is None else pair.new_context(settings.streams, rows)
        self._prompt = torch.full((settings.streams,), -1, device=pair.device)
        # int32 as the CUDA ops read it: prefix_len of the target's forward and of the commit.
        self._start = torch.zeros(settings.streams, dtype=torch.int32, device=pair.device)
        self._anchor = torch.zeros(settings.streams, dtype=torch.int32, device=pair.device)
        self._ran: set[str] = set()
        self._fill_slots()

    @property
    def done(self) -> bool:
        """True when every prompt has all its tokens."""
        return bool((self._prompt < 0).all())

    @property
    def num_done(self) -> int:
        """Prompts that are finished."""
        return sum(transcript.done for transcript in self.transcripts)

    @property
    def impl(self) -> str:
        """What the target's ops ran as so far, see `TargetOutput`."""
        return "+".join(sorted(self._ran))

    @torch.inference_mode()
    def step(self) -> list[RoundRecord]:
        """Run one round of every running stream and return its RoundRecord; the records are read on the host."""
        tree = self._draft_tree().with_root(self._anchor)
        output, target_tokens = self._verify(tree)
        acceptance = accept(tree, target_tokens, impl=self.settings.op_impl)
        self._check(acceptance)
        records = self._records(tree, target_tokens, acceptance, output)
        self._commit(output, acceptance)
        for record in records:
            self.transcripts[record.prompt].add_round(record)
        self._fill_slots()
        return records

    # -- one round ------------------------------------------------------------------------------------------------

    def _draft_tree(self) -> DraftTree:
        method = self.settings.method
        if method.build is None or self._context is None:
            return build_root_only(len(self._start), self.pair.device)
        impl = self.settings.op_impl
        if method.top_k > MAX_K and impl != "reference" and self.pair.device.type == "cuda":
            # The kernel keeps 256 candidates at most; torch ranks the more that a large budget asks for.
            impl = "reference"
            self._ran.add("draft_topk=reference")
        top = draft_topk(self.pair.draft_logits(self._anchor, self._start, self._context), method.top_k, impl=impl)
        return method.build(top.log_probs, top.token_ids)

    def _verify(self, tree: DraftTree) -> tuple[TargetOutput, Tensor]:
        rows = VisibleRows(tree.ancestors, torch.where(self._prompt >= 0, tree.num_nodes, 0))
        positions = self._start[:, None] + tree.depth
        output = self.pair.target(
            tree.token.clamp(min=0),
            positions,
            self._cache,
            self._start,
            rows,
            taps=self.pair.taps if self._context is not None else (),
            collect_experts=self.settings.record_experts,
            impl=self.settings.impl,
        )
        self._ran.add(output.impl)
        return output, self._sample(output.hidden, positions + 1, self._prompt)

    def _sample(self, hidden: Tensor, positions: Tensor, prompts: Tensor) -> Tensor:
        settings = self.settings
        return target_sample(
            self.pair.target.head(hidden),
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            stream=prompts,
            position=positions.long(),
            impl=settings.op_impl,
        )

    def _check(self, acceptance: Acceptance) -> None:
        bad = (acceptance.status != 0) | (acceptance.bonus < 0)
        for slot in (bad & (self._prompt >= 0)).nonzero().flatten().tolist():
            prompt, status = int(self._prompt[slot]), int(acceptance.status[slot])
            reason = f"a malformed tree (status {status})" if status else "target logits that are not finite"
            raise KdlabError(f"prompt {prompt}, round at position {int(self._start[slot])}: {reason}")

    def _commit(self, output: TargetOutput, acceptance: Acceptance) -> None:
        running = self._prompt >= 0
        count = torch.where(running, acceptance.length + 1, 0).to(self._start.dtype)
        path = torch.where(running[:, None], acceptance.path, -1)
        taps = self._cache.commit(self._start, path, output.taps, self.settings.op_impl)
        if self._context is not None and taps is not None:
            self.pair.extend_context(self._context, taps, self._start, count)
        self._start = self._start + count
        self._anchor = torch.where(running, acceptance.bonus, self._anchor)

    def _records(
        self, tree: DraftTree, target_tokens: Tensor, acceptance: Acceptance, output: TargetOutput
    ) -> list[RoundRecord]:
        records = []
        for slot in (self._prompt >= 0).nonzero().flatten().tolist():
            prompt, num_nodes = int(self._prompt[slot]), int(tree.num_nodes[slot])
            experts = output.expert_ids
            records.append(
                RoundRecord(
                    prompt=prompt,
                    round=len(self.transcripts[prompt].rounds),
                    anchor_position=int(self._start[slot]),
                    tree=tree.stream(slot).to("cpu"),
                    target_tokens=target_tokens[slot, :num_nodes].cpu().numpy(),
                    path=tuple(acceptance.path[slot, : int(acceptance.length[slot]) + 1].tolist()),
                    bonus=int(acceptance.bonus[slot]),
                    expert_ids=None if experts is None else experts[slot, :, :num_nodes].cpu().numpy(),
                    nonfinite_draft_rows=int(tree.nonfinite_rows[slot]),
                )
            )
        return records

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

    def _fill_slots(self) -> None:
        """Give the slot of every finished stream to the next waiting prompt, or leave it inert."""
        for slot, prompt in enumerate(self._prompt.tolist()):
            if prompt >= 0 and not self.transcripts[prompt].done:
                continue
            # A prompt may end with its first token: the slot then holds fewer rows than the one before it used.
            self._prompt[slot], self._start[slot] = -1, 0
            while self._waiting and self._prompt[slot] < 0:
                self._admit(slot, self._waiting.pop(0))

    @torch.inference_mode()
    def _admit(self, slot: int, prompt: int) -> None:
        """Prefill a prompt into a slot and draw its first token, the first anchor."""
        transcript, device = self.transcripts[prompt], self.pair.device
        output = prefill(
            self.pair,
            torch.tensor([transcript.prompt_ids], device=device),
            self._cache.stream(slot),
            None if self._context is None else self._context.stream(slot),
            self.settings.impl,
        )
        self._ran.add(output.impl)
        length = torch.tensor([[len(transcript.prompt_ids)]], device=device)
        anchor = self._sample(output.hidden[:, -1:], length, torch.tensor([prompt], device=device))[0, 0]
        if anchor < 0:
            raise KdlabError(f"prompt {prompt}: target logits after the prompt are not finite")
        transcript.extend([int(anchor)])
        if not transcript.done:
            self._prompt[slot], self._start[slot], self._anchor[slot] = prompt, length[0, 0], anchor


def prefill(
    pair: Pair, token_ids: Tensor, cache: LatentCache, context: DraftContext | None, impl: str = "auto"
) -> TargetOutput:
    """Run committed tokens through the target from position 0, in chunks, filling the cache and the draft context.

    Args:
        pair: models.
        token_ids: [1, T] int, T >= 1.
        cache: of one stream, written at rows 0..T-1.
        context: of one stream, given the features of positions 0..T-1; None for AR.
        impl: of the target's ops.

    Returns:
        What the target returned for the last chunk.
    """
    for first in range(0, token_ids.shape[1], PREFILL_CHUNK):
        chunk = token_ids[:, first : first + PREFILL_CHUNK]
        size = chunk.shape[1]
        start = torch.tensor([first], dtype=torch.int32, device=token_ids.device)
        mask = torch.ones(1, size, size, dtype=torch.bool, device=token_ids.device).tril()
        positions = start + torch.arange(size, device=token_ids.device)[None]
        taps = () if context is None else pair.taps
        output = pair.target(chunk, positions, cache, start, mask, taps=taps, impl=impl)
        if context is not None:
            pair.extend_context(context, output.taps, start, torch.tensor([size], device=token_ids.device))
    return output
