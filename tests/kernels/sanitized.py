"""Small calls of every CUDA op, for compute-sanitizer: `python -m tests.kernels.sanitized CASE` runs one case of CASES.

Inputs are made on the CPU, so that the tool has little but kdlab's kernels to watch. The last line names the kernels
that ran. test_sanitizer_gpu.py starts this under each tool.
"""

import random
import sys
from collections.abc import Callable

import torch

from kdlab.kernels import draft_topk, jit, kv_commit, merge_shards, sample_shards, skinny_linear, stream_advance
from kdlab.kernels import target_sample as sampling
from kdlab.kernels import verify_attention_wgmma as wgmma
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.embed_shard import embed_shard
from kdlab.kernels.forward_rows import forward_rows
from kdlab.kernels.mma_peak import mma_peak
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.kernels.norm_rope import norm_rope
from kdlab.kernels.router import router
from kdlab.kernels.verify_attention import verify_attention
from kdlab.tree import accept, build_best_first
from tests.kernels import (
    moe_cases,
    test_draft_attention,
    test_forward_rows,
    test_head_norm_rope,
    test_kv_commit,
    test_merge_shards,
    test_norm_rope,
    test_stream_advance,
    test_target_sample,
    test_tree_build,
    verify_cases,
)
from tests.tree.samples import sample_tree
from tests.tree.test_accept import likely_target

BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Values of about 1, made on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def layer() -> None:
    """Norms, rotations, cache rows and embeddings of a few rows."""
    for rows, update in ((4, True), (1, False)):
        add_norm(randn(rows, 256), randn(rows, 256, seed=1) if update else None, randn(256), 1e-5, impl="cuda")
    for interleaved in (False, True):
        norm_rope(*test_norm_rope.new_case(BF16).to("cuda"), eps=1e-6, interleaved=interleaved, impl="cuda")
    heads = test_head_norm_rope.new_case(BF16, dim=64).to("cuda")
    heads.heads("cuda")
    heads.append("cuda")
    forward_rows(*test_forward_rows.new_case(device="cuda"), test_forward_rows.ROPE, impl="cuda")
    embed_shard(torch.tensor([[0, 15, 16, 17]]).cuda(), randn(16, 128), first_id=8, impl="cuda")


def rounds() -> None:
    """What a round does beside the models: accepted rows move, streams advance."""
    paths, prefixes = [[0, 2, 3], [0, 15, 14], []], [62, 0, 5]
    pages, table, prefix, path, taps = (t.cuda() for t in test_kv_commit.new_case(paths, prefixes, features=64))
    kv_commit.kv_commit(pages, table, prefix, path, taps=taps, impl="cuda")
    stream_advance.stream_advance(**test_stream_advance.new_case(device="cuda", tail=4), impl="cuda")
    tree = sample_tree()
    accept(tree.to("cuda"), torch.tensor(likely_target(tree, random.Random(0))).cuda(), impl="cuda")
    mma_peak(torch.zeros(jit.num_sms(torch.device("cuda")) * 256).cuda(), 1)


def trees(*budgets: int) -> None:
    """Trees of peaked and of flat drafts; their arrays are compared with the heap's."""
    log_probs, ids = test_tree_build.candidates(7, 64)
    log_probs, ids = log_probs[:2].contiguous(), ids[:2].contiguous()
    for budget in budgets:
        got = build_best_first(log_probs.cuda(), ids.cuda(), budget, impl="cuda").to("cpu")
        test_tree_build.assert_same_tree(got, build_best_first(log_probs, ids, budget))


def logits() -> None:
    """Candidates and samples, whole and from the shards of two ranks."""
    rows = test_merge_shards.hard_logits(4096, "cpu").cuda()
    draft_topk.draft_topk(rows, 16, impl="cuda")
    shards_of = test_merge_shards.shards_of
    top = shards_of(rows, 2, lambda part, first: draft_topk.draft_topk_shard(part, 16, first_id=first))
    merge_shards.merge_topk(top, impl="cuda")
    for sampler in ((0.0, 1.0), (1.0, 1.0), (0.7, 0.5)):
        settings = test_target_sample.options(sampler, 2, 5, "cpu")
        settings |= {name: settings[name].cuda() for name in ("stream", "position")}
        sampling.target_sample(rows, **settings, impl="cuda")
        draws = shards_of(
            rows, 2, lambda part, first, own=settings: sample_shards.target_sample_shard(part, first_id=first, **own)
        )
        merged, mass = merge_shards.merge_candidates(draws, impl="cuda"), None
        if sampler[0] > 0 and sampler[1] < 1:
            mass = sample_shards.top_p_mass_shard(rows, merged, first_id=0, temperature=sampler[0])
        merge_shards.choose_token(merged, mass, top_p=sampler[1], impl="cuda")


def linear() -> None:
    """Products by one block a tile and by clusters, gated, with float32 results, and a matrix a head."""
    for rows in (1, 9):
        for inputs in (128, 1024):
            x, weight = randn(rows, inputs), randn(64, inputs)
            skinny_linear.skinny_linear(x, weight, impl="cuda")
            skinny_linear.skinny_linear(x, weight, gated=True, impl="cuda")
            skinny_linear.skinny_linear(x, weight, dtype=torch.float32, impl="cuda")
        skinny_linear.skinny_matmul(randn(2, rows, 128), randn(2, 128, 64), impl="cuda")


def routing() -> None:
    """The router: logits by clusters of blocks, then the choice."""
    for rows in (1, 3):
        router(randn(rows, 512), randn(384, 512), randn(384, dtype=torch.float32), 8, 2.5, impl="cuda")


def experts() -> None:
    """INT4 and dense experts by few and many rows, without and with a shared one."""
    for rows in (1, 2, 9):
        for shared in (False, True):
            moe(moe_cases.new_case(rows, shared=shared))
    moe(moe_cases.new_case(3, scale=None))


def moe(case: dict[str, object]) -> None:
    """One call of moe_int4 on the GPU."""

    def moved(value: object) -> object:
        fields = getattr(value, "__dataclass_fields__", None)
        return value.cuda() if fields is None else type(value)(*(getattr(value, name).cuda() for name in fields))

    moe_int4(**{name: moved(value) for name, value in case.items()}, impl="cuda")


def draft_attention() -> None:
    """Blocks over contexts with and without several parts to merge."""
    for starts, window in (((3, 70), None), ((600,), None), ((200,), 100)):
        case = test_draft_attention.new_case(starts, dtype=BF16, window=window)
        test_draft_attention.Case(*(t.cuda() for t in case.tensors()), window, case.causal).run("cuda")


def verify(impl: str, *shapes: tuple[list[int], list[int]], cluster: int = 0, fixed: bool = False) -> None:
    """Attention with prefixes and nodes by stream, compared with float64; `cluster` sets the blocks of a cluster."""
    if cluster:
        wgmma.choose_cluster = lambda *_: cluster
    for prefixes, nodes in shapes:
        case = verify_cases.make_case(prefixes, nodes, 8, device="cpu")
        o, _ = verify_attention(
            *(t.cuda() for t in case.tensors), scale=verify_cases.SCALE, latent_dim=512, impl=impl, fixed_split=fixed
        )
        torch.testing.assert_close(o.cpu().double(), case.expected()[0], rtol=0, atol=2e-2)


SMALL, LONG, ALONE = ([130, 0], [3, 2]), ([700], [9]), ([1100], [2])
CASES: dict[str, tuple[Callable[[], None], str]] = {
    "layer": (layer, "add_norm norm_rope head_norm_rope append_context forward_rows embed_shard"),
    "rounds": (rounds, "kv_commit stream_advance tree_accept mma_peak"),
    "trees": (lambda: trees(7, 64), "tree_build"),
    "large trees": (lambda: trees(300, 700), "tree_build"),
    "logits": (logits, "draft_topk merge_topk target_greedy target_draw merge_candidates top_p_mass choose_token"),
    "linear": (linear, "skinny_linear skinny_linear_columns"),
    "routing": (routing, "skinny_linear router_choose"),
    "experts": (experts, "moe_row_gate_up moe_row_down moe_gate_up moe_down moe_sum skinny_linear"),
    "draft_attention": (draft_attention, "draft_attention draft_merge"),
    "naive": (lambda: verify("naive", SMALL), "verify_attention_naive"),
    "mma": (lambda: verify("mma", SMALL, LONG), "verify_attention_mma verify_merge"),
    "mma fixed": (lambda: verify("mma", ALONE, fixed=True), "verify_attention_mma verify_merge verify_merge_prefix"),
    "wgmma 1": (lambda: verify("wgmma", SMALL, LONG, cluster=1), "verify_attention_wgmma"),
    "wgmma 2": (lambda: verify("wgmma", SMALL, LONG, cluster=2), "verify_attention_wgmma"),
    "wgmma 8": (lambda: verify("wgmma", SMALL, LONG, cluster=8), "verify_attention_wgmma"),
    "wgmma fixed": (lambda: verify("wgmma", SMALL, LONG, fixed=True), "verify_attention_wgmma"),
}
"""By name what runs, and the kernels that it must run."""


def main() -> None:
    """Run one case and print the kernels that it launched."""
    launched, launch = set(), jit.Kernel.launch

    def spy(self: jit.Kernel, *args: object, **options: object) -> None:
        launched.add(self.name)
        launch(self, *args, **options)

    jit.Kernel.launch = spy
    CASES[sys.argv[1]][0]()
    torch.cuda.synchronize()
    print("kernels:", *sorted(launched))


if __name__ == "__main__":
    main()
