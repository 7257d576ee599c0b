"""target_sample: every token equals the CPU's float64 draw, whatever the batch, the layout and the number of shards."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels import reference
from kdlab.kernels.sample_shards import target_sample_shard, top_p_mass_shard
from kdlab.kernels.target_sample import target_sample, target_sample_cost
from tests.kernels.compare import guarded_allocations

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABS = [1, 2, 31, 257, 1000, 20_480, 163_840, 262_144]
SAMPLERS = [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (1.5, 1.0), (1.0, 0.9), (0.5, 0.3), (1.5, 0.3), (1.5, 0.9)]
EXTREME = [(1e-4, 1.0), (1e-30, 0.5), (1e4, 0.7), (1e30, 1.0), (1.0, 1e-9)]
SEED = 2**63 + 12345


def random_logits(*shape, seed=0, std=3.0, dtype=torch.bfloat16, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * std).to(dtype)


def keys(streams, rows, device="cuda", start=0):
    stream = torch.arange(streams, device=device) * 7 + 2**33
    return {"stream": stream, "position": torch.arange(streams * rows, device=device).view(streams, rows) + start}


def options(sampler, streams, rows, device="cuda", start=0, seed=SEED):
    return dict(temperature=sampler[0], top_p=sampler[1], seed=seed, **keys(streams, rows, device, start))


def on_cpu(logits, settings):
    moved = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in settings.items()}
    return reference.target_sample(logits.cpu(), **moved)


def assert_same_tokens(logits, settings, expected=None):
    tokens = target_sample(logits, **settings)
    assert tokens.dtype == torch.int32
    expected = on_cpu(logits, settings) if expected is None else expected
    assert tokens.tolist() == expected.tolist()


def hostile_rows(vocab, dtype, device):
    rising = torch.arange(vocab, device=device).float()
    rows = {
        "all equal": torch.zeros(vocab, device=device),
        "few values": rising * 7919 % 5,
        "rising": rising / 100,
        "falling": -rising / 100,
        "signed zeros": torch.where(rising % 3 == 0, -0.0, 0.0),
        "every second -inf": torch.where(rising % 2 == 0, -torch.inf, rising * 1e-3),
        "one finite": torch.where(rising == vocab // 2, 3.0, -torch.inf),
        "large": (rising % 11 - 5) * 6000,
        "peaked": torch.where(rising == vocab - 1, 30.0, torch.sin(rising)),
    }
    return torch.stack(list(rows.values()))[None].to(dtype)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_is_the_first_maximum(vocab, dtype):
    for logits in (random_logits(3, 11, vocab, dtype=dtype), hostile_rows(vocab, dtype, "cuda")):
        settings = options((0.0, 1.0), *logits.shape[:2])
        top = logits.amax(-1, keepdim=True)
        first = (logits == top).int().argmax(-1)
        assert_same_tokens(logits, settings, torch.where(top[..., 0].isfinite(), first, -1))


@gpu
@pytest.mark.parametrize("sampler", SAMPLERS[1:], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 1000, 20_481])
def test_draws_equal_the_cpu(vocab, sampler):
    for dtype in DTYPES:
        logits = random_logits(3, 40 if vocab < 2000 else 4, vocab, seed=vocab, dtype=dtype)
        assert_same_tokens(logits, options(sampler, *logits.shape[:2], start=vocab))


@gpu
@pytest.mark.parametrize("sampler", SAMPLERS[1:], ids=str)
@pytest.mark.parametrize("vocab", [163_840, 262_144])
def test_draws_from_large_vocabularies_equal_float64(vocab, sampler):
    """The reference on the GPU is float64 as well; a logarithm that differs in its last bit changes no draw here."""
    logits = random_logits(1, 33 if vocab == 163_840 else 8, vocab, seed=1)
    settings = options(sampler, *logits.shape[:2])
    assert_same_tokens(logits, settings, reference.target_sample(logits, **settings))


@gpu
@pytest.mark.parametrize("sampler", [*SAMPLERS[1:], *EXTREME], ids=str)
def test_hostile_rows_and_extreme_settings(sampler):
    for vocab, dtype in ((1000, torch.float32), (5003, torch.bfloat16)):
        logits = hostile_rows(vocab, dtype, "cuda")
        assert_same_tokens(logits, options(sampler, *logits.shape[:2]))


@gpu
def test_many_draws_follow_the_distribution_and_the_cpu():
    """32,768 draws of a 40-token row: equal to the CPU's one by one, and spread as softmax says (chi-square)."""
    row = random_logits(40, std=1.5, dtype=torch.float32)
    logits = row.expand(8, 4096, 40)
    for temperature in (0.5, 1.0, 1.5):
        settings = options((temperature, 1.0), 8, 4096)
        tokens = target_sample(logits, **settings)
        assert torch.equal(tokens.cpu(), on_cpu(logits, settings))
        share = (row.double() / temperature).softmax(-1).cpu()
        counts = tokens.flatten().cpu().bincount(minlength=40).double()
        expected = share * tokens.numel()
        often = expected > 8
        assert ((counts - expected)[often].square() / expected[often]).sum() < 90  # 39 degrees, 1 in 100,000
        greedy = target_sample(logits, **(settings | {"temperature": 0.0})).flatten().cpu().bincount(minlength=40)
        assert ((greedy - expected)[often].square() / expected[often]).sum() > 1000  # the broken twin


@gpu
def test_a_token_differs_when_its_key_does():
    logits = random_logits(2, 64, 5000, std=0.1)
    settings = options((1.0, 1.0), 2, 64)
    tokens = target_sample(logits, **settings)
    for change in ({"seed": SEED + 1}, {"seed": SEED + 2**32}, {"position": settings["position"] + 1},
                   {"stream": settings["stream"] + 1}):  # fmt: skip
        other = target_sample(logits, **(settings | change))
        assert (other != tokens).float().mean() > 0.9
        with pytest.raises(AssertionError):  # the broken twin: another key
            assert_same_tokens(logits, settings | change, tokens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocab", [1, 700, 50_000])
def test_bad_rows_give_minus_one_alone(fault, vocab, device):
    places = sorted({0, vocab // 2, vocab - 1})
    logits = random_logits(1, len(places) + 2, vocab, device=device, dtype=torch.float32)
    for row, place in enumerate(places):
        logits[0, row, place] = fault
    logits[0, len(places)] = -torch.inf
    for sampler in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9)):
        tokens = target_sample(logits, **options(sampler, *logits.shape[:2], device))[0].tolist()
        assert tokens[:-1] == [-1] * (len(places) + 1)
        assert tokens[-1] >= 0


@gpu
@pytest.mark.parametrize("sampler", [(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)], ids=str)
@pytest.mark.parametrize("vocab", [20_480, 163_840])
def test_a_token_does_not_depend_on_the_batch(sampler, vocab):
    """Of the larger vocabulary 8 blocks share a row that is alone, one takes a row of many."""
    logits = random_logits(8, 33, vocab)
    settings = options(sampler, 8, 33)
    whole = target_sample(logits, **settings)
    for s, n in ((0, 0), (3, 17), (7, 32)):
        key = {"stream": settings["stream"][s : s + 1], "position": settings["position"][s : s + 1, n : n + 1]}
        assert target_sample(logits[s : s + 1, n : n + 1].clone(), **(settings | key)).item() == whole[s, n]


@gpu
def test_views_are_read_in_place():
    flat = random_logits(3 * 4 * 5003 + 8)
    for sampler in ((0.0, 1.0), (1.0, 0.9)):
        for start in (0, 1, 3, 8):
            logits = flat[start : start + 3 * 4 * 5003].view(3, 4, 5003)
            assert_same_tokens(logits, options(sampler, 3, 4))
        padded = random_logits(3, 5, 4096)
        for logits in (padded[..., :4001], padded[1:, ::2, 3:3000], padded.transpose(0, 1)):
            assert_same_tokens(logits, options(sampler, *logits.shape[:2]))


@gpu
def test_nothing_is_written_beside_the_outputs():
    for sampler in ((0.0, 1.0), (1.0, 0.9)):
        logits, settings = random_logits(2, 3, 50_001), options(sampler, 2, 3)
        expected = on_cpu(logits, settings)
        with guarded_allocations() as check:
            assert_same_tokens(logits, settings, expected)
            for first, width in ((0, 25_002), (25_002, 24_999)):
                shard = logits[..., first : first + width]
                target_sample_shard(shard, first_id=first, **settings)
        check()


@gpu
@pytest.mark.parametrize("sampler", [(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)], ids=str)
def test_a_graph_replays_with_other_data(sampler):
    logits, settings = random_logits(1, 33, 20_480), options(sampler, 1, 33)
    target_sample(logits, **settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = target_sample(logits, **settings)
    for seed in (1, 2):
        logits.copy_(random_logits(1, 33, 20_480, seed=seed))
        settings["position"] += 100
        graph.replay()
        assert tokens.tolist() == on_cpu(logits, settings).tolist()


@gpu
def test_offsets_pass_two_to_the_31():
    logits = torch.full((1, 13_108, 163_840), -1.0, dtype=torch.float16, device="cuda")
    logits[0, -1] = random_logits(163_840, dtype=torch.float16)
    for sampler in ((0.0, 1.0), (1.0, 0.9)):
        settings = options(sampler, 1, 13_108)
        tokens = target_sample(logits, **settings)
        last = {name: v[:, -2:] if name == "position" else v for name, v in settings.items()}
        assert tokens[0, -2:].tolist() == on_cpu(logits[:, -2:], last)[0].tolist()


@gpu
def test_opcheck():
    logits, settings = random_logits(2, 3, 500), options((1.0, 0.9), 2, 3)
    key = settings["stream"], settings["position"]
    for temperature in (0.0, 1.0):
        torch.library.opcheck(torch.ops.kdlab.target_sample.default, (logits, temperature, 0.9, -7, *key))
        capacity = 64 if temperature else 1
        torch.library.opcheck(
            torch.ops.kdlab.target_sample_shard.default, (logits, 400, 100, capacity, temperature, 0.9, -7, *key)
        )
    _, token_ids, values, top = target_sample_shard(logits, first_id=0, **settings)
    torch.library.opcheck(torch.ops.kdlab.top_p_mass.default, (logits, 400, 100, values, token_ids, top, 1.0))


def test_fake_tensors_have_the_right_shapes():
    with FakeTensorMode():
        logits = torch.empty(2, 3, 5000, dtype=torch.bfloat16, device="cuda")
        settings = options((1.0, 0.9), 2, 3)
        tokens = target_sample(logits, **settings)
        shard = target_sample_shard(logits, first_id=0, **settings)
        mass = top_p_mass_shard(logits, shard, first_id=0, temperature=1.0)
    assert (tokens.shape, tokens.dtype, tokens.device.type) == ((2, 3), torch.int32, "cuda")
    assert (shard.scores.shape, shard.scores.dtype, shard.top.shape) == ((2, 3, 64), torch.float64, (2, 3))
    assert (mass.shape, mass.dtype) == ((2, 3, 65), torch.float64)


def test_the_cpu_runs_the_reference():
    logits = random_logits(2, 3, 50, device="cpu")
    for sampler in SAMPLERS:
        settings = options(sampler, 2, 3, "cpu")
        for impl in ("auto", "reference"):
            assert_same_tokens(logits, settings | {"impl": impl}, reference.target_sample(logits, **settings))


def test_bad_arguments_are_named():
    logits, settings = torch.zeros(1, 2, 16), options((1.0, 0.9), 1, 2, "cpu")
    for change, error, match in (
        ({"temperature": -1.0}, ArgumentError, "temperature"),
        ({"temperature": torch.nan}, ArgumentError, "temperature"),
        ({"top_p": 0.0}, ArgumentError, "top_p"),
        ({"top_p": 1.5}, ArgumentError, "top_p"),
        ({"seed": 2**64}, ArgumentError, "seed"),
        ({"seed": -1}, ArgumentError, "seed"),
        ({"stream": torch.zeros(2, dtype=torch.int64)}, ShapeError, "stream"),
        ({"position": torch.zeros(1, 2)}, ShapeError, "position: expected int64"),
        ({"impl": "fast"}, ArgumentError, "impl"),
        ({"impl": "cuda"}, UnsupportedDevice, "cpu"),
    ):
        with pytest.raises(error, match=match):
            target_sample(logits, **(settings | change))


@gpu
def test_what_the_kernel_cannot_read_is_refused():
    settings = options((1.0, 0.9), 1, 2)
    with pytest.raises(ShapeError, match="float32, bfloat16 or float16"):
        target_sample(random_logits(1, 2, 600).double(), **settings)
    with pytest.raises(ShapeError, match="side by side"):
        target_sample(random_logits(1, 600, 2).transpose(1, 2), **settings)
    with pytest.raises(ArgumentError, match="temperature"):
        target_sample(random_logits(1, 2, 600), **(settings | {"temperature": 1e-31}))


def test_the_cost_is_one_read():
    assert target_sample_cost(8, 33, 163_840, dtype=torch.bfloat16).bytes == 264 * (163_840 * 2 + 4)
