"""One round of all streams on the device: draft, build, verify, accept, commit; the host decides and waits for nothing.

AR is a tree of the root alone, a chain is a tree of one path. Shapes are fixed: rows that a tree does not use, and all
rows of a stream that rests, are padding that no one sees.
"""

import torch
from torch import Tensor

from kdlab.decode.round_buffer import RoundBuffer
from kdlab.decode.settings import Settings
from kdlab.decode.streams import Streams
from kdlab.kernels import add_norm, draft_attention, embed_shard, router
from kdlab.kernels.capture import capture
from kdlab.kernels.draft_topk import MAX_K
from kdlab.kernels.jit import looking_once
from kdlab.kernels.round_rows import round_rows
from kdlab.kernels.stage import span, stage
from kdlab.kernels.tree_accept import tree_accept_impl
from kdlab.model.cache import LatentCache
from kdlab.model.draft_context import DraftContext
from kdlab.model.pair import Pair
from kdlab.model.target import TargetOutput
from kdlab.model.visible_rows import VisibleRows
from kdlab.tree import Acceptance, DraftTree, accept, build_root_only


class Round:
    """The buffers of S streams and `run()`.

    Attributes:
        streams: where each stands.
        record: what the last round left for the host.
        impls: what the ops ran as, see `TargetOutput`.
    """

    def __init__(self, pair: Pair, settings: Settings, cache: LatentCache, context: DraftContext | None) -> None:
        """Make the buffers; every slot is empty.

        Args:
            pair: models.
            settings: from `make_settings`.
            cache: of the streams, with room for the tree's rows behind each.
            context: of the streams; None for AR.
        """
        self.pair, self.settings, self.cache, self.context = pair, settings, cache, context
        self.impls = _left_to_torch(pair, settings)
        config, num_streams = pair.target.config, settings.streams
        self.streams = Streams.allocate(
            num_streams, config.vocab_size, settings.stop_token_ids, settings.tail, pair.device
        )
        self._root_only = build_root_only(num_streams, pair.device)
        experts = None
        if settings.record_experts:
            experts = sum(map(config.is_moe_layer, range(config.num_hidden_layers))), config.num_experts_per_tok
        depth_limit = 0 if context is None else pair.depth_limit
        self.record = RoundBuffer(num_streams, settings.method.budget + 1, depth_limit, pair.device, experts)
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        """Turn `run()` into one CUDA graph; while every slot is empty, as the rounds of the warm-up write nothing."""
        with torch.cuda.device(self.pair.device):
            self._graph = capture([self._run])

    def run(self) -> None:
        """Queue one round of every running stream, and its record."""
        with span("round"):
            if self._graph is None:
                with looking_once():
                    self._run()
            else:
                self._graph.replay()

    @torch.inference_mode()
    def _run(self) -> None:
        streams, settings = self.streams, self.settings
        tree = self._draft_tree()
        output, target_tokens = self._verify(tree)
        with stage("accept"):
            acceptance = accept(tree, target_tokens, impl=settings.op_impl)
            self.record.write(streams, tree, target_tokens, acceptance, output.expert_ids, settings.op_impl)
        self._commit(tree, acceptance, output)

    def _draft_tree(self) -> DraftTree:
        method = self.settings.method
        if method.build is None or self.context is None:
            return self._root_only
        streams, op_impl = self.streams, self.settings.op_impl
        top = self.pair.draft_top(streams.anchor, streams.start, self.context, method.top_k, impl=op_impl)
        with stage("tree_build"):
            return method.build(top.log_probs, top.token_ids)

    def _verify(self, tree: DraftTree) -> tuple[TargetOutput, Tensor]:
        pair, settings, streams = self.pair, self.settings, self.streams
        rows = round_rows(
            tree.token,
            tree.depth,
            tree.num_nodes,
            start=streams.start,
            anchor=streams.anchor,
            running=streams.running,
            impl=settings.op_impl,
        )
        output = pair.target(
            tree.token,
            rows.positions,
            self.cache,
            streams.start,
            VisibleRows(tree.ancestors, rows.num_rows),
            taps=pair.taps if self.context is not None else (),
            collect_experts=settings.record_experts,
            impl=settings.impl,
        )
        self.impls.add(output.impl)
        return output, sample(pair, settings, output.hidden, streams.prompt, rows.behind)

    def _commit(self, tree: DraftTree, acceptance: Acceptance, output: TargetOutput) -> None:
        with stage("commit"):
            start, path, num_rows = self.streams.advance(tree.token, acceptance, self.settings.op_impl)
            taps = self.cache.commit(start, path, output.tapped, self.settings.op_impl)
        if self.context is not None and taps is not None:
            self.pair.extend_context(self.context, taps, start, num_rows, self.settings.op_impl)


def _left_to_torch(pair: Pair, settings: Settings) -> set[str]:
    """Name the ops of a round that have a CUDA form, but none for this size."""
    method, device, dtype, config = settings.method, pair.device, pair.dtype, pair.target.config
    if device.type != "cuda" or settings.op_impl == "reference":
        return set()
    groups, width = (config.n_group, config.topk_group), config.hidden_size
    routes = any(map(config.is_moe_layer, range(config.num_hidden_layers)))
    left = {
        "add_norm": not add_norm.has_kernel(width, dtype),
        "embed_shard": pair.ranks.size > 1 and not embed_shard.has_kernel(width, dtype),
        "router": routes
        and not router.has_kernel(config.n_routed_experts, config.num_experts_per_tok, dtype, groups),
        "draft_topk": method.top_k > MAX_K,
        "tree_build": not method.builds_on_gpu,
        "tree_accept": tree_accept_impl(method.budget + 1, device) == "reference",
    }
    if pair.drafter is not None and method.build is not None:
        left["draft_attention"] = not draft_attention.has_kernel(pair.drafter.config.head_dim, dtype, device)
    return {f"{name}=reference" for name, is_left in left.items() if is_left}


def sample(pair: Pair, settings: Settings, hidden: Tensor, prompt: Tensor, position: Tensor) -> Tensor:
    """Return the target's token behind every row, greedy or drawn as the settings say.

    Args:
        pair: models.
        settings: of the decode.
        hidden: [S, N, D], after the target's final norm.
        prompt: [S] i64, index of each stream's prompt.
        position: [S, N] i64, absolute position of the token that is drawn.

    Returns:
        [S, N] i32; -1 where the logits are not finite.
    """
    return pair.sample(
        hidden,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
        stream=prompt,
        position=position,
        impl=settings.op_impl,
    )
