"""Small calls of every CUDA op, for compute-sanitizer: `python -m tests.kernels.sanitized CASE` runs one of CASES.

Inputs are made on the CPU, so that the tool has little but kdlab's kernels to watch. The last line names the kernels
that ran. test_sanitizer_gpu.py starts this under each tool.
"""

import random
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from kdlab.kernels import (
    draft_topk,
    jit,
    kv_commit,
    merge_shards,
    moe_builds,
    sample_shards,
    skinny_linear,
    stream_advance,
)
from kdlab.kernels import target_sample as sampling
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.embed_shard import embed_blocks, embed_shard
from kdlab.kernels.forward_rows import forward_rows
from kdlab.kernels.mma_peak import mma_peak
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.kernels.norm_rope import norm_rope
from kdlab.kernels.pack_words import pack_words
from kdlab.kernels.round_rows import round_rows
from kdlab.kernels.router import router
from kdlab.tree import accept, build_best_first
from tests.kernels import (
    moe_cases,
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
)
from tests.kernels.planted import TWINS
from tests.kernels.sanitized_attention import attention, hopper
from tests.tree.samples import sample_tree
from tests.tree.test_accept import likely_target

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def randn(*shape, dtype=BF16, seed=0):
    """Values of about 1, made on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def layer():
    """Norms, rotations, cache rows and embeddings of a few rows."""
    for dtype in (BF16, F32):
        for rows, update in ((4, True), (1, False)):
            x, added, weight = (randn(*shape, dtype=dtype) for shape in ((rows, 256), (rows, 256), (256,)))
            add_norm(x, added if update else None, weight, 1e-5, impl="cuda")
        for interleaved in (False, True):
            case = test_norm_rope.new_case(dtype).to("cuda")
            norm_rope(*case, eps=1e-6, interleaved=interleaved, inputs_are_old=interleaved, impl="cuda")
        heads = test_head_norm_rope.new_case(dtype, dim=64).to("cuda")
        heads.heads("cuda")
        heads.append("cuda")
    forward_rows(*test_forward_rows.new_case(device="cuda"), test_forward_rows.ROPE, impl="cuda")
    tokens, shard = torch.tensor([0, 15, 16, 17]).cuda(), randn(16, 128)
    embed_shard(tokens[None], shard, first_id=8, impl="cuda")
    embed_blocks(tokens, shard, first_id=8, block_size=3, mask_id=9, impl="cuda")


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
    for dtype in (BF16, F32):
        candidates_and_samples(rows.to(dtype))


def candidates_and_samples(rows):
    """Those of logits [S, N, V]."""
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
    for rows in (1, 9, 70):
        for inputs in (128, 2048):  # a slab a block, and two
            x, weight = randn(rows, inputs), randn(64, inputs)
            skinny_linear.skinny_linear(x, weight, impl="cuda")
            skinny_linear.skinny_linear(x, weight, gated=True, impl="cuda")
            skinny_linear.skinny_linear(x, weight, dtype=torch.float32, impl="cuda")
        skinny_linear.skinny_matmul(randn(2, rows, 128), randn(2, 128, 64), impl="cuda")
        for inputs in (512, 896):  # by skinny_linear, and by router_gate
            router(randn(rows, inputs), randn(384, inputs), randn(384, dtype=torch.float32), 8, 2.5, impl="cuda")


def experts():
    """INT4 and dense experts by few rows, without and with a shared one."""
    for rows in (1, 4, 9):
        for shared in (False, True):
            moe(moe_cases.new_case(rows, shared=shared))
    moe(moe_cases.new_case(3, shared=True, inner=64))
    moe(moe_cases.new_case(33, width=1024))  # blocks share units
    moe(moe_cases.new_case(3, scale=None))
    moe(moe_cases.new_case(3, dtype=F32, shared=True))
    moe(moe_cases.new_case(3, dtype=F32, scale=None))


def many_rows():
    """INT4 experts by so many rows that they are a product of matrices, in narrow and in wide tiles."""
    rows, wide_rows = moe_builds.MANY_ROWS, moe_builds.WIDE_ROWS
    moe(moe_cases.new_case(rows, shared=True))
    moe_builds.WIDE_ROWS = rows  # the same kernels as from wide_rows rows on, which take these tools long
    moe(moe_cases.new_case(rows))
    moe(moe_cases.new_case(rows, dtype=F16, scale=F16))
    moe_builds.WIDE_ROWS = wide_rows


def moe(case):
    """One call of moe_int4 on the GPU."""

    def moved(value):
        fields = getattr(value, "__dataclass_fields__", None)
        return value.cuda() if fields is None else type(value)(*(getattr(value, name).cuda() for name in fields))

    moe_int4(**{name: moved(value) for name, value in case.items()}, impl="cuda")


SWITCHES = {"DTYPE": 1, "FINE": 1, "PACKED": 1, "PARTS": 1, "SCALE_DTYPE": 1, "SHARED_WIDTH": 1, "TILE_EIGHTS": 4,
            "WHOLE_DOWN": 1}  # fmt: skip
"""Constants of a build that choose code, and from which value on: of the others the same code is made larger."""


def variant(build: str) -> str:
    """Return the file of a build, as `str` names it, and which of the code's switches are on."""
    values = dict(re.findall(r"(\w+)=(\d+)", build))
    on = [name for name, least in SWITCHES.items() if int(values.get(name, 0)) >= least]
    return "+".join([build.split(".")[0], *on])


class Case(NamedTuple):
    """What runs, the kernels that it must run, and the variants of their code."""

    run: Callable[[], None]
    kernels: str
    variants: str


CASES = {
    "layer": Case(
        layer,
        "add_norm norm_rows norm_rope head_norm_rope append_context forward_rows embed_shard",
        "add_norm add_norm+DTYPE norm_rope norm_rope+DTYPE head_norm_rope head_norm_rope+DTYPE"
        " forward_rows embed_shard",
    ),
    "rounds": Case(
        rounds,
        "kv_commit stream_advance tree_accept round_rows pack_words mma_peak",
        "kv_commit stream_advance tree_accept round_rows pack_words mma_peak+DTYPE",
    ),
    "trees": Case(trees, "tree_build", "tree_build tree_build+FINE"),
    "logits": Case(
        logits,
        "draft_topk merge_topk target_greedy target_draw merge_candidates best_candidate top_p_mass choose_token",
        "draft_topk draft_topk+DTYPE target_sample target_sample+DTYPE top_p_mass top_p_mass+DTYPE merge_shards",
    ),
    "linear": Case(
        linear,
        "skinny_linear skinny_linear_columns router_gate router_choose",
        "skinny_linear+DTYPE router_gate+DTYPE router",
    ),
    "experts": Case(
        experts,
        "moe_few_gate_up moe_few_down moe_gate_up moe_slices moe_down moe_sum",
        "moe_few_rows+DTYPE+PACKED+SCALE_DTYPE moe_few_rows+DTYPE+PACKED+SCALE_DTYPE+SHARED_WIDTH"
        " moe_slices+DTYPE+SCALE_DTYPE moe_slices+DTYPE+SCALE_DTYPE+SHARED_WIDTH"
        " moe_int4+DTYPE+PACKED+SCALE_DTYPE+WHOLE_DOWN moe_int4+DTYPE+PACKED+SCALE_DTYPE+SHARED_WIDTH+WHOLE_DOWN"
        " moe_int4+DTYPE+PACKED+SCALE_DTYPE+SHARED_WIDTH moe_int4+PACKED+SCALE_DTYPE+SHARED_WIDTH"
        " moe_int4+DTYPE+SCALE_DTYPE moe_int4",
    ),
    "many rows": Case(
        many_rows,
        "moe_many_plan moe_many_activate moe_many_experts moe_many_sum",
        "moe_many_rows+DTYPE+SCALE_DTYPE moe_many_rows+DTYPE+SCALE_DTYPE+TILE_EIGHTS",
    ),
    "attention": Case(
        attention,
        "draft_attention draft_merge verify_attention_naive verify_attention_mma verify_merge verify_merge_prefix",
        "draft_attention+DTYPE verify_attention_naive verify_attention_naive+DTYPE verify_attention_mma+DTYPE"
        " verify_merge+DTYPE",
    ),
    "hopper": Case(
        hopper,
        "verify_attention_wgmma verify_parts",
        "verify_attention_wgmma+DTYPE verify_attention_wgmma+DTYPE+PARTS verify_parts+DTYPE",
    ),
}


def main():
    """Run one case and print the kernels that it launched, and the variants of their code."""
    launched, variants, launch = set(), set(), jit.Kernel.launch

    def spy(self, *args, **options):
        launched.add(self.name)
        variants.add(variant(self.what))
        launch(self, *args, **options)

    jit.Kernel.launch = spy
    name = sys.argv[1]
    (TWINS[name][1] if name in TWINS else CASES[name].run)()
    torch.cuda.synchronize()
    print("kernels:", *sorted(launched))
    print("variants:", *sorted(variants))


if __name__ == "__main__":
    main()
