"""Random cases of moe_int4 with their float64 oracle."""

import torch

from kdlab.kernels.experts import DenseExperts, PackedExperts
from kdlab.kernels.moe_int4 import moe_int4
from tests.kernels.compare import assert_faults_are_found, assert_within_budget

MINI = {"width": 256, "inner": 128, "num_experts": 24, "top_k": 4}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def new_experts(num_experts, width, inner, dtype, scale, generator, device="cpu"):
    """Experts whose outputs have about the size of their inputs; INT4 with scales of dtype `scale`, None dense."""

    def dense(*shape):
        values = torch.randn(shape, generator=generator, device=generator.device) / shape[-1] ** 0.5
        return values.to(device, dtype)

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, generator=generator, device=generator.device).int().to(device)

    def scales(*shape):
        near_one = torch.rand(shape, generator=generator, device=generator.device) + 0.5
        return (near_one / (4.6 * (32 * shape[-1]) ** 0.5)).to(device, scale)

    rows = (num_experts, 2 * inner, width), (num_experts, width, inner)
    if scale is None:
        return DenseExperts(*(dense(*shape) for shape in rows))
    return PackedExperts(*(make(e, n, k // per) for e, n, k in rows for make, per in ((words, 8), (scales, 32))))


def new_case(num_rows, *, dtype=BF16, scale=BF16, shared=False, seed=0, device="cpu", **sizes):
    """Keyword arguments of moe_int4; the picks of a row differ from one another."""
    sizes = MINI | sizes
    generator = torch.Generator(device if sizes["width"] > 1024 else "cpu").manual_seed(seed + num_rows)
    width, inner, num_experts, top_k = (sizes[name] for name in MINI)
    draw = {"generator": generator, "device": generator.device}
    ids = torch.rand(num_rows, num_experts, **draw).argsort(-1)[:, :top_k]
    case = {
        "x": torch.randn(num_rows, width, **draw).to(device, dtype),
        "expert_ids": ids.int().to(device),
        "weights": torch.rand(num_rows, top_k, **draw).to(device),
        "experts": new_experts(num_experts, width, inner, dtype, scale, generator, device),
    }
    return case | ({"shared": new_experts(1, width, inner, dtype, None, generator, device)} if shared else {})


def widened(experts):
    fields = (getattr(experts, name) for name in type(experts).__dataclass_fields__)
    return type(experts)(*(t.double() if t.is_floating_point() else t for t in fields))


def in_float64(case):
    wide = {name: widened(case[name]) for name in ("experts", "shared") if name in case}
    return moe_int4(**(case | wide | {"x": case["x"].double()}), impl="reference")


def assert_right(case, out=None):
    """Compare with float64, and show that faults in the result would be found; return the kernel's result."""
    out = moe_int4(**case, impl="cuda") if out is None else out
    exact, plain = in_float64(case), moe_int4(**case, impl="reference")
    assert_within_budget(out, exact, plain)
    if len(out) > 1:
        assert_faults_are_found(out, exact, plain)
    return out


def skipping(case):
    """Ids that are no expert: among others, a whole row of them, above E; and a row that picks one expert twice."""
    ids = case["expert_ids"]
    ids[1, 2], ids[2], ids[3, 0], ids[4, 1] = -1, -1, 24, 2**31 - 1
    ids[0] = ids[0, 0]
    return case


def one_pick_at_a_time(case):
    """The oracle of skipped picks, in float64."""
    experts, x = widened(case["experts"]), case["x"].double()
    out = torch.zeros_like(x)
    for row, ids in enumerate(case["expert_ids"].tolist()):
        for slot, expert in enumerate(ids):
            if 0 <= expert < 24:
                gate_up, down = experts.matrices(expert, torch.float64)
                gate, up = (gate_up @ x[row]).chunk(2)
                out[row] += case["weights"][row, slot].double() * (down @ (torch.nn.functional.silu(gate) * up))
    return out
