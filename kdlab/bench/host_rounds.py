"""Rounds as engines run them today, for our own to be timed against: the host takes part, and is waited for.

Target and drafter are the same, each captured in a graph of its own. The draft's best tokens come to the host in two
copies, a heap there builds the trees, their arrays go to the device, the target's tokens come back in a third copy, and
the host walks the trees and says what to commit. Three synchronisations a round, as in DDTree's own code (github.com/
liranringel/ddtree); greedy. What could be lean is: pinned buffers, no checks, no records.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kdlab.decode.engine import prefill
from kdlab.decode.settings import Settings
from kdlab.decode.transcript import Transcript
from kdlab.errors import NotSupported
from kdlab.kernels.ancestors import ancestor_words, depths_of, num_words
from kdlab.kernels.capture import capture
from kdlab.model.cache import LatentCache
from kdlab.model.pair import Pair
from kdlab.model.prompts import PromptSet, prompt_token_ids
from kdlab.model.visible_rows import VisibleRows
from kdlab.tree.build import grow
from kdlab.tree.pack import Nodes


@dataclass(frozen=True, slots=True)
class HostRound:
    """What is kept of one round of one stream."""

    prompt: int
    anchor_position: int
    num_tokens: int


class _Mirror:
    """A device buffer and the host memory that it is filled from."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *shape: int, fill: int = 0) -> None:
        staged = torch.full(shape, fill, dtype=dtype, pin_memory=device.type == "cuda")
        self._staged, self.host = staged, staged.numpy()
        self.tensor = staged.to(device, copy=True)

    def send(self) -> None:
        """Queue the copy to the device; the host memory may be written again after the next synchronisation."""
        self.tensor.copy_(self._staged, non_blocking=True)


class HostRounds:
    """Decodes prompts in groups of S streams; used as an Engine is, `admit()` and `step()` until `done`.

    Attributes:
        settings: of the decode.
        transcripts: one Transcript a prompt.
        impl: what the target's ops ran as.
    """

    def __init__(self, pair: Pair, prompts: PromptSet, settings: Settings) -> None:
        """Allocate, and capture the three parts of a round where `settings.graph` says so.

        Args:
            pair: models; one rank.
            prompts: from `as_prompt_set`.
            settings: of a greedy "ddtree".

        Raises:
            NotSupported: settings of something else.
        """
        if settings.method.name != "ddtree" or settings.temperature or settings.method.budget < 1:
            raise NotSupported("arm", "a greedy 'ddtree' for rounds of the host", settings.method.name)
        self.pair, self.settings, self.impl = pair, settings, ""
        self._prompt_ids = [prompt_token_ids(prompt, pair.tokenizer) for prompt in prompts]
        rows, device, streams = settings.method.budget + 1, pair.device, settings.streams
        total = max(map(len, self._prompt_ids)) + settings.max_new_tokens + rows + pair.depth_limit + 1
        self._cache = LatentCache.allocate(pair.target.config, streams, total, pair.dtype, device)
        self._context = pair.new_context(streams, total)
        whole = torch.int32
        self._start, self._anchor = (_Mirror(device, whole, streams) for _ in range(2))
        self._token, self._depth = (_Mirror(device, whole, streams, rows) for _ in range(2))
        self._ancestors = _Mirror(device, whole, streams, rows, num_words(rows))
        self._num_nodes, self._count = (_Mirror(device, whole, streams) for _ in range(2))
        self._path = _Mirror(device, whole, streams, pair.depth_limit + 1, fill=-1)
        self._found: dict[str, Tensor] = {}  # what the parts of a round hand on
        parts: list[Callable[[], None]] = [self._draft, self._verify, self._commit]
        self._parts = [self._captured(part) for part in parts] if settings.graph else parts
        self.restart()

    @property
    def done(self) -> bool:
        """True when every prompt has all its tokens."""
        return not self._waiting and self.num_running == 0

    @property
    def num_running(self) -> int:
        """Streams that want more tokens."""
        return sum(prompt is not None for prompt in self._slots)

    def restart(self) -> None:
        """Forget what was decoded; the next `admit()` begins with the first prompts."""
        settings = self.settings
        self.transcripts = [
            Transcript(ids, settings.max_new_tokens, "length", settings.stop_token_ids) for ids in self._prompt_ids
        ]
        self._waiting = list(range(len(self._prompt_ids)))
        self._slots: list[int | None] = [None] * settings.streams

    def admit(self) -> None:
        """Let waiting prompts take the free slots."""
        for slot in range(len(self._slots)):
            while self._waiting and self._slots[slot] is None:
                self._admit(slot, self._waiting.pop(0))
        self._start.send()
        self._anchor.send()

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> list[HostRound]:
        """Run one round of every running stream."""
        draft, verify, commit = self._parts
        draft()
        log_probs, token_ids = self._found["log_probs"].cpu(), self._found["token_ids"].cpu()  # two synchronisations
        trees = self._send_trees(log_probs.tolist(), token_ids.tolist())
        verify()
        target_tokens = self._found["target_tokens"].cpu().tolist()  # the third
        rounds = self._send_paths(trees, target_tokens)
        commit()
        self._start.send()
        self._anchor.send()
        if admit:
            self.admit()
        return rounds

    # -- on the device --------------------------------------------------------------------------------------------

    def _captured(self, part: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self.pair.device):
            return capture([part]).replay

    @torch.inference_mode()
    def _draft(self) -> None:
        anchor, start, op_impl = self._anchor.tensor, self._start.tensor, self.settings.op_impl
        logits = self.pair.draft_logits(anchor, start, self._context, op_impl).float()
        best = logits.topk(self.settings.method.top_k, dim=-1)
        self._found["log_probs"] = best.values - logits.logsumexp(dim=-1, keepdim=True)
        self._found["token_ids"] = best.indices

    @torch.inference_mode()
    def _verify(self) -> None:
        rows = VisibleRows(self._ancestors.tensor.view(torch.uint32), self._num_nodes.tensor)
        start = self._start.tensor
        positions, taps = start[:, None] + self._depth.tensor, self.pair.taps
        output = self.pair.target(
            self._token.tensor, positions, self._cache, start, rows, taps=taps, impl=self.settings.impl
        )
        self.impl = output.impl
        self._found["target_tokens"] = self.pair.target.head(output.hidden).argmax(dim=-1)
        tapped = output.taps
        if tapped is not None:
            self._found["taps"] = tapped

    @torch.inference_mode()
    def _commit(self) -> None:
        start, op_impl = self._start.tensor, self.settings.op_impl
        taps = self._cache.commit(start, self._path.tensor, [self._found["taps"]], op_impl)
        self.pair.extend_context(self._context, taps, start, self._count.tensor, op_impl)

    # -- on the host ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _admit(self, slot: int, prompt: int) -> None:
        transcript = self.transcripts[prompt]
        ids = torch.tensor([transcript.prompt_ids], device=self.pair.device)
        place, settings = (self._cache.stream(slot), self._context.stream(slot)), self.settings
        output = prefill(self.pair, ids, *place, settings.impl, settings.op_impl)
        transcript.extend([int(self.pair.target.head(output.hidden[:, -1]).argmax())])
        if not transcript.done:
            self._slots[slot] = prompt
            self._start.host[slot], self._anchor.host[slot] = len(transcript.prompt_ids), transcript.tokens[0]

    def _send_trees(self, log_probs: list[list[list[float]]], token_ids: list[list[list[int]]]) -> dict[int, Nodes]:
        """Build the trees of the running streams and queue their arrays; the others get no rows."""
        trees: dict[int, Nodes] = {}
        words = self._ancestors.host.shape[-1]
        self._num_nodes.host[:] = 0
        for slot, prompt in enumerate(self._slots):
            if prompt is None:
                continue
            nodes = trees[slot] = grow(log_probs[slot], token_ids[slot], self.settings.method.budget)
            size = self._num_nodes.host[slot] = len(nodes.token)
            nodes.token[0] = int(self._anchor.host[slot])
            self._token.host[slot, :size] = nodes.token
            self._depth.host[slot, :size] = depths_of(nodes.parent)
            self._ancestors.host[slot, :size] = ancestor_words(nodes.parent, words).view(np.int32)
        for buffer in (self._token, self._depth, self._ancestors, self._num_nodes):
            buffer.send()
        return trees

    def _send_paths(self, trees: dict[int, Nodes], target_tokens: list[list[int]]) -> list[HostRound]:
        """Walk the trees, queue what to commit, and take the new tokens over."""
        rounds = []
        self._count.host[:], self._path.host[:] = 0, -1
        starts = self._start.host.copy()
        for slot, nodes in trees.items():
            path, bonus = _walk(nodes, target_tokens[slot])
            self._count.host[slot] = len(path)
            self._path.host[slot, : len(path)] = path
            prompt = self._slots[slot]
            assert prompt is not None
            transcript = self.transcripts[prompt]
            transcript.extend([*(nodes.token[row] for row in path[1:]), bonus])
            rounds.append(HostRound(prompt, int(starts[slot]), len(path)))
            self._start.host[slot], self._anchor.host[slot] = starts[slot] + len(path), bonus
            if transcript.done:
                self._slots[slot] = None
        for buffer in (self._count, self._path):
            buffer.send()
        return rounds


def _walk(nodes: Nodes, target_tokens: list[int]) -> tuple[list[int], int]:
    """Return the accepted rows, root first, and the target's token behind the last."""
    child = {(parent, token): row for row, (parent, token) in enumerate(zip(nodes.parent, nodes.token, strict=True))}
    path = [0]
    while (row := child.get((path[-1], target_tokens[path[-1]]))) is not None:
        path.append(row)
    return path, target_tokens[path[-1]]
