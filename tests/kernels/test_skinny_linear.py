"""skinny_linear and skinny_matmul: every row against float64, plans that cover all outputs, nothing else written."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import skinny_linear as module
from kdlab.kernels.skinny_linear import (
    MAX_ROWS,
    SAME_ROWS,
    choose_linear,
    make_plan,
    skinny_linear,
    skinny_linear_cost,
    skinny_matmul,
)
from tests.kernels.compare import assert_faults_are_found, assert_within_budget, guarded_allocations

gpu = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
# Of one rank of 8: q_a with kv_a, q_b, o_proj, the shared expert, its down_proj; then few outputs.
SHAPES = [(2112, 7168), (1536, 1536), (7168, 1024), (512, 7168), (7168, 256), (384, 7168), (8, 128), (72, 384)]
ROWS = [1, 2, 7, 8, 9, 16, 17, 33, 40, 41, 63, 64, 65, 71]


def new_case(rows, features, inputs, dtype=torch.bfloat16, matrices=None, seed=0):
    """Rows of different sizes, and weights whose products do not cancel alike; made on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    lead = () if matrices is None else (matrices,)
    scale = (0.01 + torch.rand(*lead, rows, 1, generator=generator)) * inputs**-0.5
    x = torch.randn(*lead, rows, inputs, generator=generator) * scale
    weight = torch.randn(*lead, features, inputs, generator=generator)
    return x.to(dtype), weight.to(dtype)


def run(x, weight, **options):
    """The kernel's result, all that is allocated for it between canaries."""
    with guarded_allocations() as check:
        y = skinny_linear(x, weight, **options, impl="cuda")
        torch.cuda.synchronize()
        check()
    return y


def run_reference(x, weight, **options):
    """The result in float64 and in the inputs' dtype; on the GPU, where the CPU would take seconds."""
    exact = skinny_linear(x.double(), weight.double(), gated=options.get("gated", False), impl="reference")
    return exact, skinny_linear(x, weight, **options, impl="reference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_auto_on_the_cpu_is_torch(dtype):
    x, weight = new_case(3, 10, 24, dtype)
    assert torch.equal(skinny_linear(x, weight), torch.nn.functional.linear(x, weight))
    y = torch.nn.functional.linear(x, weight)
    assert torch.equal(skinny_linear(x, weight, gated=True), torch.nn.functional.silu(y[:, :5]) * y[:, 5:])
    wide = skinny_linear(x, weight, dtype=torch.float32) if dtype != torch.float64 else None
    assert wide is None or torch.equal(wide, torch.nn.functional.linear(x.float(), weight.float()))
    x, weight = new_case(3, 10, 24, dtype, matrices=4)
    out = torch.empty(3, 4, 10, dtype=dtype).transpose(0, 1)
    assert skinny_matmul(x, weight.mT, out=out) is out
    assert torch.equal(out, torch.bmm(x, weight.mT))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=torch.zeros(3, 23)), ShapeError, "weight"),
        (dict(x=torch.zeros(24)), ShapeError, "x"),
        (dict(weight=torch.zeros(10, 24).half()), ShapeError, "float32 on cpu, as x"),
        (dict(weight=torch.zeros(10, 24, device="meta")), ShapeError, "as x"),
        (dict(weight=torch.zeros(9, 24), gated=True), ShapeError, "even"),
        (dict(gated=True, dtype=torch.float32), ShapeError, "gated"),
        (dict(dtype=torch.float16), ShapeError, "dtype"),
        (dict(impl="fast"), ArgumentError, "impl"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        skinny_linear(**(dict(x=torch.zeros(3, 24), weight=torch.zeros(10, 24)) | change))


def test_wrong_arguments_of_the_batched_form_are_named():
    x, weight = torch.zeros(2, 3, 24), torch.zeros(2, 24, 10)
    with pytest.raises(ShapeError, match="weight"):
        skinny_matmul(x, weight[:1])
    with pytest.raises(ShapeError, match="out"):
        skinny_matmul(x, weight, out=torch.zeros(2, 3, 9))
    with pytest.raises(UnsupportedDevice, match="cpu"):
        skinny_matmul(x, weight, impl="cuda")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(("features", "inputs"), [*SHAPES, (20480, 7168), (4608, 7168), (64, 128)])
@pytest.mark.parametrize("matrices", [1, 8])
def test_plans_do_not_depend_on_the_rows(features, inputs, matrices, arch):
    plans = [make_plan(rows, features, inputs, matrices, arch) for rows in range(1, MAX_ROWS + 1)]
    assert len({plan[:4] for plan in plans[:SAME_ROWS]}) == 1  # so that sums, and bits, do not
    for rows, plan in enumerate(plans, 1):
        assert rows <= plan.rows <= MAX_ROWS
        assert plan.split in (1, 2, 4, 8)
        assert inputs % plan.slab == 0
        assert plan.split <= inputs // plan.slab
        assert arch in module.build(torch.bfloat16, plan).archs
        assert plan.stages >= 3 or (arch == "sm_120a" and rows > 40)  # where choose_linear says torch
        assert module.shared_bytes(plan) <= {"sm_90a": 232_448, "sm_120a": 101_376}[arch]


@pytest.mark.parametrize(
    ("features", "inputs", "matrices", "rows", "expected"),
    [
        (2112, 7168, 1, 64, "skinny"),  # q_a and kv_a
        (2112, 7168, 1, 65, "torch"),
        (7168, 1024, 1, 65, "torch"),  # o_proj
        (512, 7168, 1, 72, "skinny"),  # gate_up of the shared expert, of one rank's
        (512, 7168, 1, 73, "torch"),
        (64 * 192, 1536, 1, 16, "skinny"),  # q_b of all heads, in two waves of blocks
        (64 * 192, 1536, 1, 17, "torch"),
        (8 * 192, 1536, 1, 72, "skinny"),  # of one rank's
        (512, 128, 64, 1, "torch"),  # the latent projection of all heads
        (512, 128, 8, 72, "skinny"),
        (128, 512, 8, 72, "skinny"),
        (7168, 5376, 1, 40, "skinny"),  # the drafter's fc
        (7168, 5376, 1, 41, "torch"),
    ],
)
def test_torch_takes_what_the_kernel_is_slower_at(features, inputs, matrices, rows, expected, monkeypatch):
    monkeypatch.setattr(module.jit, "arch_of", lambda device: "sm_90a")
    x = torch.empty(matrices, rows, inputs, dtype=torch.bfloat16, device="meta")
    assert choose_linear(x, x.new_empty(matrices, features, inputs)) == expected
    monkeypatch.setattr(module.jit, "arch_of", lambda device: "sm_80")
    assert choose_linear(x, x.new_empty(matrices, features, inputs)) == "torch"


def test_fake_tensors():
    with FakeTensorMode():

        def new(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        x, weight = new(3, 256), new(16, 256)
        assert skinny_linear(x, weight, impl="cuda").shape == (3, 16)
        assert skinny_linear(x, weight, gated=True, impl="cuda").shape == (3, 8)
        assert skinny_linear(x, weight, dtype=torch.float32, impl="cuda").dtype == torch.float32
        assert skinny_matmul(new(2, 3, 256), new(2, 256, 64), impl="cuda").shape == (2, 3, 64)
        for rows, inputs, dtype in ((3, 256, torch.float32), (0, 256, x.dtype), (73, 256, x.dtype), (3, 200, x.dtype)):
            with pytest.raises(NotSupported, match="skinny_linear"):
                skinny_linear(new(rows, inputs, dtype=dtype), new(16, inputs, dtype=dtype), impl="cuda")
        for features, inputs in ((0, 256), (16, 0)):
            with pytest.raises(NotSupported, match="at least one"):
                skinny_linear(new(3, inputs), new(features, inputs), impl="cuda")
            assert skinny_linear(new(3, inputs), new(features, inputs)).shape == (3, features)
        with pytest.raises(NotSupported, match="at least one"):
            skinny_matmul(new(0, 3, 256), new(0, 256, 64), impl="cuda")
        assert skinny_matmul(new(0, 3, 256), new(0, 256, 64)).shape == (0, 3, 64)


@pytest.mark.parametrize(
    ("arch", "rows", "features", "inputs"),
    [("sm_80", 1, 64, 128), ("sm_89", 1, 64, 128), ("sm_120a", 41, 7168, 5376), ("sm_120a", 64, 7168, 5376)],
)
def test_a_gpu_without_clusters_or_room_is_refused_and_left_to_torch(arch, rows, features, inputs, monkeypatch):
    monkeypatch.setattr(module.jit, "arch_of", lambda device: arch)
    x, weight = (torch.empty(1, n, inputs, dtype=torch.bfloat16, device="meta") for n in (rows, features))
    assert choose_linear(x, weight) == "torch"
    with pytest.raises(UnsupportedDevice, match=f"{arch} has no (clusters|room for {rows} rows)"):
        module.run_skinny(x, weight, x.new_empty(1, rows, features), 0)
    assert module.has_room(rows, features, inputs, 1, "sm_90a")


def test_a_plan_of_nothing_is_refused():
    for sizes in ((0, 64, 128, 1), (MAX_ROWS + 1, 64, 128, 1), (1, 0, 128, 1), (1, 64, 0, 1), (1, 64, 128, 0)):
        with pytest.raises(ArgumentError):
            make_plan(*sizes)


def test_cost():
    assert skinny_linear_cost(33, 512, 7168).bytes == 2 * (512 * 7168 + 33 * (512 + 7168))
    assert skinny_linear_cost(33, 512, 128, matrices=8).flops == 8 * 2 * 33 * 512 * 128


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "inputs"), SHAPES, ids=str)
def test_kernel_against_float64(features, inputs, dtype):
    x, weight = (t.cuda() for t in new_case(MAX_ROWS, features, inputs, dtype))
    exact, plain = run_reference(x, weight)
    whole, same = run(x, weight), run(x[:SAME_ROWS], weight)
    assert_within_budget(whole, exact, plain)
    assert_faults_are_found(whole, exact, plain, tile=8)
    for rows in ROWS:
        some, wanted = run(x[:rows], weight), same if rows <= SAME_ROWS else whole
        assert torch.equal(some, wanted[:rows]), f"{rows} rows: other bits than among {len(wanted)}"
    assert_within_budget(same, exact[:SAME_ROWS], plain[:SAME_ROWS])


@gpu
@pytest.mark.parametrize("rows", [1, 9, 33, 64, 72])
@pytest.mark.parametrize(("features", "inputs"), [(512, 7168), (48, 256), (4608, 1024)], ids=str)
def test_gated_and_float32_results(features, inputs, rows):
    x, weight = (t.cuda() for t in new_case(rows, features, inputs))
    assert_within_budget(run(x, weight, dtype=torch.float32), *run_reference(x, weight, dtype=torch.float32))
    exact, plain = run_reference(x, weight, gated=True)
    assert_within_budget(run(x, weight, gated=True), exact, plain)
    swapped = run(x, torch.cat(weight.chunk(2)[::-1]), gated=True)
    with pytest.raises(AssertionError):
        assert_within_budget(swapped, exact, plain)


@gpu
@pytest.mark.parametrize(("features", "inputs", "gated"), [(4608, 7168, True), (896, 43008, False)], ids=str)
def test_large_matrices_of_the_drafter(features, inputs, gated):
    """Of one rank of 8: gate_up and fc, whose inputs are six tapped layers; both take the large tile."""
    x, weight = (t.cuda() for t in new_case(40, features, inputs))
    exact, plain = run_reference(x, weight, gated=gated)
    whole = run(x, weight, gated=gated)
    assert_within_budget(whole, exact, plain)
    assert_faults_are_found(whole, exact, plain, tile=8)
    for rows in (1, 9):
        assert torch.equal(run(x[:rows], weight, gated=gated), whole[:rows]), f"{rows} rows: other bits than among 40"


@gpu
@pytest.mark.parametrize("rows", [1, 9, 33, 64, 72])
@pytest.mark.parametrize(("features", "inputs", "columns"), [(512, 128, True), (128, 512, False), (192, 384, True)])
def test_batched_on_views_of_wider_tensors(features, inputs, columns, rows):
    heads = 8
    x, weight = new_case(rows, features, inputs, matrices=heads)
    wide_x = torch.full((rows, heads, inputs + 64), torch.nan, dtype=x.dtype)  # as q: one row holds all heads
    wide_x[..., :inputs] = x.transpose(0, 1)
    stored = weight.mT.contiguous() if columns else weight
    wide_w = torch.full((heads, 2 * stored.shape[1], stored.shape[2]), torch.nan, dtype=x.dtype)  # as kv_b
    wide_w[:, : stored.shape[1]] = stored
    out = torch.full((rows, heads, features + 64), 7.0, dtype=x.dtype, device="cuda")
    w = wide_w.cuda()[:, : stored.shape[1]]
    view = out[..., :features].transpose(0, 1)
    skinny_matmul(wide_x.cuda()[..., :inputs].transpose(0, 1), w if columns else w.mT, out=view, impl="cuda")
    exact, plain = torch.bmm(x.double(), weight.double().mT), torch.bmm(x, weight.mT)
    assert_within_budget(view.cpu(), exact, plain)
    assert_faults_are_found(view.cpu(), exact, plain, tile=8)
    assert (out[..., features:] == 7).all()


@gpu
def test_auto_takes_torch_where_the_kernel_does_not_run():
    for rows, features, inputs, dtype in ((73, 64, 256, torch.bfloat16), (3, 64, 96, torch.bfloat16),
                                          (3, 64, 256, torch.float32), (0, 64, 256, torch.bfloat16)):  # fmt: skip
        x, weight = (t.cuda() for t in new_case(rows, features, inputs, dtype))
        assert torch.equal(skinny_linear(x, weight), torch.nn.functional.linear(x, weight))
        with pytest.raises(NotSupported):
            skinny_linear(x, weight, impl="cuda")


@gpu
def test_unused_rows_may_hold_anything():
    x, weight = (t.cuda() for t in new_case(9, 512, 1024))
    clean = run(x, weight)
    x[5:] = torch.nan
    assert torch.equal(run(x, weight)[:5], clean[:5])


@gpu
def test_capture_replays_with_new_rows():
    x, weight = (t.cuda() for t in new_case(17, 512, 7168))
    skinny_linear(x, weight, impl="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(3):  # each kernel starts before the one ahead of it has ended
            y = skinny_linear(x + y[:, :1], weight, impl="cuda")
    for scale in (1.0, -2.0):
        x.mul_(scale)
        graph.replay()
        want = x
        for _ in range(3):
            want = skinny_linear(x + want[:, :1], weight, impl="cuda")
        assert torch.equal(y, want)


@gpu
@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated):
    x, weight = (t.cuda() for t in new_case(5, 128, 256))
    torch.library.opcheck(torch.ops.kdlab.skinny_linear.default, (x, weight, gated, False))
    torch.library.opcheck(torch.ops.kdlab.skinny_matmul.default, (x[None], weight.mT[None], x.new_empty(1, 5, 128)))
