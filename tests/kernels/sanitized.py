"""Small calls of every CUDA op, for compute-sanitizer: `python -m tests.kernels.sanitized CASE` runs one of CASES.

Inputs are made on the CPU, so that the tool has little but kdlab's kernels to watch. The last line names the kernels
that ran. test_sanitizer_gpu.py starts this under each tool.
"""

import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kdlab.kernels import (
    draft_topk,
    jit,
    kv_commit,
    merge_shards,
    sample_shards,
    skinny_linear,
    stream_advance,
    verify_attention_flashmla,
)
from kdlab.kernels import target_sample as sampling
from kdlab.kernels import verify_attention_wgmma as wgmma
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.embed_shard import embed_shard
from kdlab.kernels.forward_rows import forward_rows
from kdlab.kernels.mma_peak import mma_peak
from kdlab.kernels.moe_builds import MANY_ROWS
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.kernels.norm_rope import norm_rope
from kdlab.kernels.pack_words import pack_words
from kdlab.kernels.round_rows import round_rows
from kdlab.kernels.router import router
from kdlab.kernels.verify_attention import verify_attention
from kdlab.paths import CSRC
from kdlab.tree import accept, build_best_first
from tests.kernels import (
    moe_cases,
    test_draft_attention,
    test_forward_rows,
    test_head_norm_rope,
    test_kv_commit,
    test_merge_shards,
    test_norm_rope,
    test_pack_words,
    test_round_rows,
    test_stream_advance,
    test_target_sample,
    test_tree_build,
    verify_cases,
)
from tests.tree.samples import sample_tree
from tests.tree.test_accept import likely_target

BF16 = torch.bfloat16


def randn(*shape, dtype=BF16, seed=0):
    """Values of about 1, made on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def layer():
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


def rounds():
    """What a round does beside the models: trees are walked, accepted rows move, streams advance."""
    round_rows(**test_round_rows.new_case(2, 129, "cuda"), impl="cuda")
    fields = test_pack_words.new_fields(2, 129, "cuda")
    pack_words(fields, test_pack_words.expected(fields), impl="cuda")
    paths, prefixes = [[0, 2, 3], [0, 15, 14], []], [62, 0, 5]
    pages, table, prefix, path, taps = (t.cuda() for t in test_kv_commit.new_case(paths, prefixes, features=64))
    kv_commit.kv_commit(pages, table, prefix, path, taps=taps.split(32, dim=-1), impl="cuda")
    stream_advance.stream_advance(**test_stream_advance.new_case(device="cuda", tail=4), impl="cuda")
    tree = sample_tree()
    accept(tree.to("cuda"), torch.tensor(likely_target(tree, random.Random(0))).cuda(), impl="cuda")
    mma_peak(torch.zeros(jit.num_sms(torch.device("cuda")) * 256).cuda(), 1)


def trees():
    """Trees of a peaked and of a flat draft by every way through the kernel; their arrays are those of the heap."""
    log_probs, ids = test_tree_build.candidates(7, 64)
    log_probs, ids = log_probs[:2].contiguous(), ids[:2].contiguous()
    for budget in (7, 64, 300, 700):
        got = build_best_first(log_probs.cuda(), ids.cuda(), budget, impl="cuda").to("cpu")
        test_tree_build.assert_same_tree(got, build_best_first(log_probs, ids, budget))


def logits():
    """Candidates and samples, whole and from the shards of two ranks."""
    rows = test_merge_shards.hard_logits(1024, "cpu").cuda()
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
        if draws.scores.shape[-1] == 1:
            merge_shards.best_candidate(draws, impl="cuda")
        merged, mass = merge_shards.merge_candidates(draws, impl="cuda"), None
        if sampler[0] > 0 and sampler[1] < 1:
            mass = sample_shards.top_p_mass_shard(rows, merged, first_id=0, temperature=sampler[0])
        merge_shards.choose_token(merged, mass, top_p=sampler[1], impl="cuda")


def linear():
    """Products by one block a tile and by clusters: gated, with float32 results, a matrix a head, the router's."""
    for rows in (1, 9):
        for inputs in (128, 1024):
            x, weight = randn(rows, inputs), randn(64, inputs)
            skinny_linear.skinny_linear(x, weight, impl="cuda")
            skinny_linear.skinny_linear(x, weight, gated=True, impl="cuda")
            skinny_linear.skinny_linear(x, weight, dtype=torch.float32, impl="cuda")
        skinny_linear.skinny_matmul(randn(2, rows, 128), randn(2, 128, 64), impl="cuda")
        router(randn(rows, 512), randn(384, 512), randn(384, dtype=torch.float32), 8, 2.5, impl="cuda")


def experts():
    """INT4 and dense experts by few and many rows, without and with a shared one."""
    for rows in (1, 2, 9):
        for shared in (False, True):
            moe(moe_cases.new_case(rows, shared=shared))
    moe(moe_cases.new_case(3, scale=None))
    moe(moe_cases.new_case(MANY_ROWS))


def moe(case):
    """One call of moe_int4 on the GPU."""

    def moved(value):
        fields = getattr(value, "__dataclass_fields__", None)
        return value.cuda() if fields is None else type(value)(*(getattr(value, name).cuda() for name in fields))

    moe_int4(**{name: moved(value) for name, value in case.items()}, impl="cuda")


def draft_attention():
    """Blocks over contexts with and without several parts to merge."""
    for starts, window, past_is_old in (((3, 70), None, False), ((600,), None, True), ((200,), 100, True)):
        case = test_draft_attention.new_case(starts, dtype=BF16, window=window)
        on_gpu = test_draft_attention.Case(*(t.cuda() for t in case.tensors()), window, case.causal)
        on_gpu.run("cuda", past_is_old=past_is_old)


def verify(impl, prefixes, nodes, *, fixed=False):
    """Attention over these prefixes and trees, compared with float64."""
    case = verify_cases.make_case(prefixes, nodes, 8, device="cpu")
    o, _ = verify_attention(
        *(t.cuda() for t in case.tensors), scale=verify_cases.SCALE, latent_dim=512, impl=impl, fixed_split=fixed
    )
    torch.testing.assert_close(o.cpu().double(), case.expected()[0], rtol=1e-2, atol=2e-2)


def flashmla():
    """The merge with FlashMLA's result, whose own kernels are not for these tests to check."""

    class Package:
        """Stands for flash_mla: a prefix of zeros."""

        get_mla_metadata = staticmethod(lambda: (None,))

        @staticmethod
        def flash_mla_with_kvcache(q, *_, **options):
            streams, rows, heads, _ = q.shape
            return torch.zeros(streams, rows, heads, 512).to(BF16).cuda(), torch.zeros(streams, heads, rows).cuda()

    verify_attention_flashmla.load_flashmla = Package
    case = verify_cases.make_case([130, 0], [3, 2], 8, device="cpu")
    verify_attention(*(t.cuda() for t in case.tensors), scale=1.0, latent_dim=512, impl="flashmla")


def attention():
    """The draft's attention, and the target's by the kernels for every GPU."""
    draft_attention()
    verify("naive", [130, 0], [3, 2])
    verify("mma", [130, 0], [3, 2])
    verify("mma", [700], [9])
    verify("mma", [1100], [2], fixed=True)
    flashmla()


def hopper():
    """The target's attention by the kernels for Hopper: a persistent grid, parts of tiles, and parts of the prefix."""
    most_parts = wgmma.most_parts
    for parts in (1, 3):
        wgmma.most_parts = partial(lambda parts, *_: parts, parts)
        verify("wgmma", [130, 0], [3, 2])
        verify("wgmma", [700], [9])
    wgmma.most_parts = most_parts
    verify("wgmma", [700], [9], fixed=True)


TWIN = """
#include "named_barriers.cuh"
// Half of the block writes and the other half reads. FAULT 1: it reads before it waits. FAULT 2: a value too many.
extern "C" __global__ void __launch_bounds__(64) twin(int* out) {
  __shared__ int data[32];
  const int i = threadIdx.x % 32;
  if (threadIdx.x == 0) named_barrier_init(1, 64);
  __syncthreads();
  if (threadIdx.x < 32) {
    data[i] = i;
    named_barrier_arrive(1, 64);
  } else {
    if (FAULT != 1) named_barrier(1, 64);
    out[FAULT == 2 ? i + 1 : i] = data[31 - i];
    if (FAULT == 1) named_barrier(1, 64);
  }
}
"""


def twin(fault):
    """A kernel with one of these faults."""
    with tempfile.TemporaryDirectory() as folder:
        jit.build.CSRC = Path(folder)
        for name in ("named_barriers.cuh", "common.cuh"):
            shutil.copy(CSRC / name, folder)
        (jit.build.CSRC / "twin.cu").write_text(TWIN)
        out = torch.zeros(32, dtype=torch.int32).cuda()
        jit.kernel(jit.Build("twin.cu", (("FAULT", fault),)), "twin", out.device).launch(1, 64, out)
        torch.cuda.synchronize()


class Case(NamedTuple):
    """What runs, and the kernels that it must run."""

    run: Callable[[], None]
    kernels: str


MANY = "moe_many_plan moe_many_gate_up moe_many_down moe_many_sum"
CASES = {
    "layer": Case(layer, "add_norm norm_rows norm_rope head_norm_rope append_context forward_rows embed_shard"),
    "rounds": Case(rounds, "kv_commit stream_advance tree_accept round_rows pack_words mma_peak"),
    "trees": Case(trees, "tree_build"),
    "logits": Case(
        logits,
        "draft_topk merge_topk target_greedy target_draw merge_candidates best_candidate top_p_mass choose_token",
    ),
    "linear": Case(linear, "skinny_linear skinny_linear_columns router_choose"),
    "experts": Case(experts, "moe_row_gate_up moe_row_down moe_gate_up moe_down moe_sum " + MANY),
    "attention": Case(
        attention,
        "draft_attention draft_merge verify_attention_naive verify_attention_mma verify_merge verify_merge_prefix",
    ),
    "hopper": Case(hopper, "verify_attention_wgmma verify_parts"),
}
TWINS = {
    "race": ("racecheck", Case(partial(twin, 1), "twin"), "Race reported between"),
    "overflow": ("memcheck", Case(partial(twin, 2), "twin"), "Invalid __global__ write of size 4 bytes"),
}
"""Faults by name: the tool that must find each, and what it says."""


def main():
    """Run one case and print the kernels that it launched."""
    launched, launch = set(), jit.Kernel.launch

    def spy(self, *args, **options):
        launched.add(self.name)
        launch(self, *args, **options)

    jit.Kernel.launch = spy
    name = sys.argv[1]
    (TWINS[name][1] if name in TWINS else CASES[name]).run()
    torch.cuda.synchronize()
    print("kernels:", *sorted(launched))


if __name__ == "__main__":
    main()
