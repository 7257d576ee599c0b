"""Cases of verify_attention: K2.6's latent cache, real trees, by streams, rows, prefix and heads."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kdlab.bench.kernels.case import LATENT, PAGE, ROPE, SCALE, Arm, Case, Inputs, generator, normal, relative_error
from kdlab.bench.kernels.tree_cases import draft_tree
from kdlab.kernels import reference
from kdlab.kernels.ancestors import unpack_ancestors
from kdlab.kernels.jit import arch_of
from kdlab.kernels.verify_attention import IMPLS, choose_impl, verify_attention, verify_attention_cost

PREFIXES = (256, 1024, 4096, 16384, 65536)
SHAPES = {
    64: ((1, 1), (1, 9), (1, 17), (1, 33), (1, 65), (4, 33), (8, 9), (8, 17), (8, 33), (8, 65)),
    8: ((1, 1), (1, 9), (1, 33), (1, 65), (8, 9), (8, 33), (8, 65)),
}
"""Streams and rows at all heads, and at the heads of one rank of 8."""
_DEFAULT = {
    64: {(1, 33, 256), (1, 33, 4096), (1, 33, 16384), (8, 33, 1024), (8, 33, 4096), (1, 1, 4096)},
    8: {(1, 33, 4096), (1, 65, 1024), (8, 33, 4096), (8, 33, 16384)},
}
_FIXED_SPLIT = {(1, 33, 4096), (8, 33, 4096)}  # where what `fixed_split` costs is shown
_LIMIT, _PEER_LIMIT = 2e-2, 5e-2  # of a row's error: bf16 keeps 8 bits of every probability and of the output
_NAIVE_PREFIX = 4096
_SHORT_WORK, _SLOW_WORK = (
    33 * 4096,
    8 * 33 * 4096,
)  # streams x rows x prefix that slow arms get in a short and a long run
_WIDTH = LATENT + ROPE


def attention_cases(heads: int) -> Iterator[Case]:
    """All shapes at so many heads."""
    for streams, rows in SHAPES[heads]:
        for prefix in PREFIXES:
            yield attention_case(streams, rows, prefix, heads, default=(streams, rows, prefix) in _DEFAULT[heads])


def attention_case(streams: int, rows: int, prefix: int, heads: int, *, default: bool = True) -> Case:
    """Every implementation beside FlashMLA over the prefix alone, without a tree, and torch's attention with a mask."""
    tree = draft_tree(streams, rows)

    def make(seed: int) -> Inputs:
        num_pages = streams * -(-(prefix + rows) // PAGE)
        table = torch.randperm(num_pages, generator=generator(seed), device="cuda")
        return {
            "q": normal(streams, rows, heads, _WIDTH, seed=seed),
            "pages": normal(num_pages, PAGE, _WIDTH, seed=seed + 1),
            "block_table": table.view(streams, -1).int(),
            "prefix_len": torch.full((streams,), prefix, dtype=torch.int32, device="cuda"),
            "ancestors": tree.ancestors.cuda(),
            "num_nodes": tree.num_nodes.cuda(),
        }

    cost = verify_attention_cost(rows, [prefix] * streams, heads)
    sizes = {"streams": streams, "rows": rows, "prefix": prefix, "heads": heads}
    work = streams * rows * prefix
    arms = {impl: _own_arm(impl) for impl in _impls(work, prefix)}
    if (streams, rows, prefix) in _FIXED_SPLIT:
        arms |= {f"{impl} fixed split": _own_arm(impl, fixed_split=True) for impl in ("mma", "wgmma")}
    arms["flashmla prefix"] = Arm(_flashmla, _prefix_error, _PEER_LIMIT, prepare=_with_schedule, own=False)
    if work <= _SLOW_WORK:
        arms["torch sdpa"] = Arm(_sdpa, _sdpa_error, _PEER_LIMIT, prepare=_dense, own=False)
    for name in ("naive", "torch sdpa"):
        if name in arms:
            arms[name] = dataclasses.replace(arms[name], short=work <= _SHORT_WORK)
    arms["torch"] = dataclasses.replace(_own_arm("reference"), own=False, timed=False)
    return Case("verify_attention", sizes, make, arms, lambda _: cost, cost.bytes, default)


def _impls(work: int, prefix: int) -> list[str]:
    """The naive kernel reads the cache once a row and head: large sizes would take the benchmark's whole time."""
    within = prefix <= _NAIVE_PREFIX and work <= _SLOW_WORK
    return [impl for impl in IMPLS if impl not in ("auto", "reference") and (impl != "naive" or within)]


def _own_arm(impl: str, **options: Any) -> Arm:
    names = ("q", "pages", "block_table", "prefix_len", "ancestors", "num_nodes")

    def run(inputs: Inputs) -> Tensor:
        tensors = (inputs[name] for name in names)
        return verify_attention(*tensors, scale=SCALE, latent_dim=LATENT, impl=impl, **options)[0]

    chosen = choose_impl(arch_of(torch.device("cuda")), torch.bfloat16, LATENT, ROPE)
    return Arm(run, _error, _LIMIT, goal=impl == chosen and not options)


def _exact(inputs: Inputs, mask: Tensor) -> Tensor:
    q, pages = inputs["q"].double(), inputs["pages"].double()
    return reference.verify_attention(q, pages, inputs["block_table"], inputs["prefix_len"], mask, SCALE, LATENT)[0]


def _error(inputs: Inputs, out: Tensor) -> float:
    return relative_error(out, _exact(inputs, unpack_ancestors(inputs["ancestors"])))


def _prefix_error(inputs: Inputs, out: Tensor) -> float:
    return relative_error(out, _exact(inputs, torch.zeros_like(unpack_ancestors(inputs["ancestors"]))))


def _sdpa_error(inputs: Inputs, out: Tensor) -> float:
    return _error(inputs, out.transpose(1, 2))


def _with_schedule(inputs: Inputs) -> Inputs:
    """An engine schedules once a round, not once a layer, so the schedule is made before the clock starts."""
    import flash_mla

    return inputs | {"schedule": flash_mla.get_mla_metadata()[0]}


def _flashmla(inputs: Inputs) -> Tensor:
    import flash_mla

    out: Tensor = flash_mla.flash_mla_with_kvcache(
        inputs["q"], inputs["pages"].unsqueeze(2), inputs["block_table"], inputs["prefix_len"], LATENT,
        inputs["schedule"], softmax_scale=SCALE, causal=False, use_legacy=True,
    )[0]  # fmt: skip
    return out


def _dense(inputs: Inputs) -> Inputs:
    """Contiguous keys, values and a mask, made before the clock starts: torch's attention knows no pages."""
    prefix, mask = int(inputs["prefix_len"][0]), unpack_ancestors(inputs["ancestors"])
    streams, rows, heads, _ = inputs["q"].shape
    keys = inputs["pages"][inputs["block_table"].long()].flatten(1, 2)[:, None, : prefix + rows]
    seen = torch.cat([mask.new_ones(streams, rows, prefix), mask], dim=-1)
    return {
        "q": inputs["q"].transpose(1, 2).contiguous(),
        "k": keys.expand(-1, heads, -1, -1),
        "v": keys[..., :LATENT].expand(-1, heads, -1, -1),
        "mask": seen[:, None],
    }


def _sdpa(inputs: Inputs) -> Tensor:
    return scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], attn_mask=inputs["mask"], scale=SCALE)
