"""Ops on the CPU: a wrong dtype, device, rank or kind of argument is refused by the argument's name, in either impl."""

import functools

import pytest
import torch

from kdlab.errors import ArgumentError, ShapeError
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.draft_attention import draft_attention
from kdlab.kernels.draft_topk import draft_topk
from kdlab.kernels.embed_shard import embed_blocks, embed_shard
from kdlab.kernels.experts import DenseExperts
from kdlab.kernels.head_norm_rope import append_context, head_norm_rope
from kdlab.kernels.int4 import dequantize_int4, pack_int4, unpack_int4
from kdlab.kernels.kv_commit import kv_commit
from kdlab.kernels.library_linear import library_linear
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.kernels.norm_rope import norm_rope
from kdlab.kernels.router import router
from kdlab.kernels.skinny_linear import skinny_linear, skinny_matmul
from kdlab.kernels.target_sample import target_sample
from kdlab.kernels.verify_attention import verify_attention

S, N, H, C, R = 2, 3, 2, 16, 8
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
STARTS, COUNTS = torch.tensor([5, 6], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
ANCESTORS = torch.tensor([1, 3, 5], dtype=torch.uint32).view(1, N, 1).repeat(S, 1, 1)
IDS, WORDS = torch.tensor([[0, 1, 2], [2, 1, 0]], dtype=torch.int32), torch.ones(3, 8, dtype=torch.int32)


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


PAGES = {"pages": floats(4, 64, C + R), "block_table": TABLE, "prefix_len": STARTS}
ROPE = {"cos": floats(20, 8), "sin": floats(20, 8), "start": STARTS, "eps": 1e-6}
CASES = {
    add_norm: {"x": floats(3, 16), "update": floats(3, 16), "weight": floats(16), "eps": 1e-6},
    router: {"x": floats(3, 16), "weight": floats(8, 16), "bias": floats(8), "used": torch.ones(3) > 0, "k": 2,
             "scale": 1.0},
    skinny_linear: {"x": floats(3, 16), "weight": floats(8, 16)},
    skinny_matmul: {"x": floats(2, 3, 16), "weight": floats(2, 16, 8), "out": floats(2, 3, 8)},
    library_linear: {"x": floats(3, 16), "weight": floats(8, 16), "out": floats(3, 8)},
    draft_attention: {
        "q": floats(S, 4, 4, 64), "k": floats(S, 4, 2, 64), "v": floats(S, 4, 2, 64), "keys": floats(S, 8, 2, 64),
        "values": floats(S, 8, 2, 64), "start": STARTS, "causal": False, "window": None,
    },
    draft_topk: {"logits": floats(S, N, 50), "k": 4},
    embed_shard: {"tokens": IDS, "weight": floats(20, 16), "first_id": 0},
    embed_blocks: {"anchor": STARTS, "weight": floats(20, 16), "first_id": 0, "block_size": 4, "mask_id": 1},
    head_norm_rope: {"x": floats(S, 4, 3, 16), "q_weight": floats(16), "k_weight": floats(16), "num_queries": 2} | ROPE,
    append_context: {
        "k": floats(1, S, 3, 2, 16), "v": floats(1, S, 3, 2, 16), "weight": floats(1, 16), "count": COUNTS,
        "keys": floats(1, S, 12, 2, 16), "values": floats(1, S, 12, 2, 16),
    } | ROPE,
    kv_commit: PAGES | {"pages": floats(2, 4, 64, C + R), "path": IDS},
    norm_rope: PAGES | {
        "kv": floats(S, N, C + R), "q_rope": floats(S, N, H, R), "norm_weight": floats(C), "cos": floats(S, N, R // 2),
        "sin": floats(S, N, R // 2), "num_nodes": COUNTS, "q": floats(S, N, H, C + R), "eps": 1e-6, "interleaved": True,
    },
    moe_int4: {"x": floats(3, 32), "expert_ids": IDS.T.contiguous(), "weights": floats(3, 2),
               "experts": DenseExperts(floats(3, 64, 32), floats(3, 32, 32))},
    target_sample: {"logits": floats(S, N, 50), "temperature": 0.7, "top_p": 0.9, "seed": 1,
                    "stream": torch.arange(S), "position": torch.arange(N).repeat(S, 1)},
    verify_attention: PAGES | {"q": floats(S, N, H, C + R), "ancestors": ANCESTORS, "num_nodes": COUNTS, "scale": 0.1,
                               "latent_dim": C},
    pack_int4: {"values": torch.ones(3, 16, dtype=torch.int8)},
    unpack_int4: {"packed": WORDS},
    dequantize_int4: {"packed": WORDS, "scale": floats(3, 2), "dtype": torch.float32},
}  # fmt: skip
WITHOUT_IMPL = (library_linear, pack_int4, unpack_int4, dequantize_int4)
ANY_DTYPE, ANY_RANK = [(kv_commit, "pages")], [(embed_shard, "tokens"), (pack_int4, "values"), (unpack_int4, "packed")]
ARGUMENTS = [
    (op, name) for op, case in CASES.items() for name, value in case.items() if isinstance(value, torch.Tensor)
]
BASES = [next(one for one in ARGUMENTS if one[0] is op) for op in CASES]  # whose device the others must be on
BASES += [(embed_shard, "weight"), (embed_blocks, "weight"), (norm_rope, "kv"), (verify_attention, "q")]


def wrong_ones(op, name, value):
    """Values that no argument of this name may have; where two arguments disagree either may be named, so not those."""
    yield [1, 2]
    if value.dtype != torch.uint32:
        yield value.to_sparse()
    if (op, name) not in ANY_DTYPE:
        yield from (
            value.to(dtype) for dtype in (torch.complex64, torch.int16 if value.is_floating_point() else torch.float32)
        )
        yield value.to(torch.bool) if value.dtype != torch.bool else value.to(torch.int32)
    if (op, name) not in ANY_RANK and not (op is dequantize_int4 and name == "packed"):
        yield value[None]
    if (op, name) not in BASES:
        yield value.to("meta")


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(("op", "name"), ARGUMENTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_wrong_argument_is_named(op, name, impl):
    case = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in CASES[op].items()}
    run = op if op in WITHOUT_IMPL else functools.partial(op, impl=impl)
    run(**case)
    for wrong in wrong_ones(op, name, CASES[op][name]):
        with pytest.raises(ShapeError) as refused:
            run(**case | {name: wrong})
        assert refused.value.argument == name


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_products_name_which_matrix_is_of_another_dtype(impl):
    """The twin: a wrong `out` was said to be a wrong `weight`, and the reference took it without a word."""
    x, weight = floats(2, 3, 16), floats(2, 16, 8)
    for name, value in (("weight", weight.double()), ("out", floats(2, 3, 8).bfloat16())):
        with pytest.raises(ShapeError, match=f"^{name}: expected torch.float32 on cpu, as x"):
            skinny_matmul(**{"x": x, "weight": weight, "impl": impl} | {name: value})
    with pytest.raises(ShapeError, match=r"^weight: expected torch\.float32 on cpu, as x"):
        skinny_linear(x[0], weight[0].mT.bfloat16(), impl=impl)


@pytest.mark.parametrize(
    ("op", "name", "values"),
    [
        (add_norm, "eps", (None, float("nan"), -1.0, "x")),
        (router, "scale", (None, float("inf"), "x")),
        (target_sample, "logits", (floats(S, N, 0),)),
    ],
    ids=["add_norm-eps", "router-scale", "target_sample-logits"],
)
def test_numbers_that_no_row_could_take_are_named(op, name, values):
    for value in values:
        with pytest.raises(ArgumentError, match=f"{name}: expected"):
            op(**CASES[op] | {name: value})
