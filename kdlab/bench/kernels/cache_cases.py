"""Cases of the ops around the latent cache: kv_commit and norm_rope."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kdlab.bench.kernels.case import (
    HIDDEN,
    LATENT,
    NUM_LAYERS,
    PAGE,
    ROPE,
    Arm,
    Case,
    Inputs,
    generator,
    normal,
    relative_error,
    wrong_share,
)
from kdlab.kernels.kv_commit import kv_commit, kv_commit_cost
from kdlab.kernels.norm_rope import norm_rope, norm_rope_cost

_WIDTH = LATENT + ROPE
_EPS = 1e-6
_PREFIX = 100  # the rows that move cross a page's edge


def commit_cases() -> Iterator[Case]:
    """Eight accepted rows in all layers; also eight streams, and with six tapped hidden rows for the drafter."""
    yield commit_case(1, 8)
    yield commit_case(8, 8)
    yield commit_case(1, 8, tap_width=6 * HIDDEN, default=False)
    yield commit_case(1, 15, default=False)


def commit_case(
    streams: int, moved: int, *, layers: int = NUM_LAYERS, tap_width: int = 0, default: bool = True
) -> Case:
    """kv_commit beside torch's index copies, all layers at once."""
    rows = 64

    def make(seed: int) -> Inputs:
        pages_a_stream = -(-(_PREFIX + rows) // PAGE)
        table = torch.randperm(streams * pages_a_stream, generator=generator(seed), device="cuda")
        # Every row moves: one that stays where it is would cost nothing.
        steps = torch.rand(streams, rows - 2, generator=generator(seed), device="cuda").topk(moved).indices
        path = torch.cat([steps.new_zeros(streams, 1), steps.sort().values + 2], dim=1).int()
        return {
            "pages": normal(layers, streams * pages_a_stream, PAGE, _WIDTH, seed=seed),
            "block_table": table.view(streams, -1).int(),
            "prefix_len": torch.full((streams,), _PREFIX, dtype=torch.int32, device="cuda"),
            "path": path,
            "taps": normal(streams, rows, tap_width, seed=seed) if tap_width else None,
        }

    def run(inputs: Inputs, impl: str = "cuda") -> tuple[Tensor, Tensor | None]:
        tensors = [inputs[name] for name in ("pages", "block_table", "prefix_len", "path")]
        taps = () if inputs["taps"] is None else (inputs["taps"],)
        return inputs["pages"], kv_commit(*tensors, taps=taps, impl=impl)

    def plain(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        return run(inputs, "reference")

    def error(inputs: Inputs, out: tuple[Tensor, Tensor | None]) -> float:
        pairs = zip(out, plain(inputs), strict=True)
        return max(wrong_share(part, exact) for part, exact in pairs if part is not None and exact is not None)

    arms = {"cuda": Arm(run, error, goal=True), "torch index": Arm(plain, error, own=False)}
    sizes = {"streams": streams, "moved": moved, "layers": layers, "tap_width": tap_width}
    cost = kv_commit_cost(layers, 2 * _WIDTH, streams * moved, 2 * tap_width, streams * (moved + 1))
    return Case("kv_commit", sizes, make, arms, lambda _: cost, cost.bytes, default)


def norm_rope_cases(heads: int) -> Iterator[Case]:
    """One layer's rows of one stream and of eight."""
    for streams, rows in ((1, 33), (8, 33)):
        yield norm_rope_case(streams, rows, heads)
    for streams, rows in ((1, 1), (8, 65)):
        yield norm_rope_case(streams, rows, heads, default=False)


def norm_rope_case(streams: int, rows: int, heads: int, *, default: bool = True) -> Case:
    """norm_rope beside the same in torch."""

    def make(seed: int) -> Inputs:
        pages_a_stream = -(-(_PREFIX + rows) // PAGE)
        num_pages = streams * pages_a_stream
        angles = normal(streams, rows, ROPE // 2, seed=seed, dtype=torch.float32)
        return {
            "kv": normal(streams, rows, _WIDTH, seed=seed),
            "q_rope": normal(streams, rows, heads, ROPE, seed=seed + 1),
            "norm_weight": normal(LATENT, seed=seed + 2),
            "cos": angles.cos(),
            "sin": angles.sin(),
            "pages": normal(num_pages, PAGE, _WIDTH, seed=seed + 3),
            "block_table": torch.arange(num_pages, dtype=torch.int32, device="cuda").view(streams, -1),
            "prefix_len": torch.full((streams,), _PREFIX, dtype=torch.int32, device="cuda"),
            "num_nodes": torch.full((streams,), rows, dtype=torch.int32, device="cuda"),
            "q": normal(streams, rows, heads, _WIDTH, seed=seed + 4),
        }

    def run(inputs: Inputs, impl: str = "cuda") -> tuple[Tensor, Tensor]:
        norm_rope(**inputs, eps=_EPS, interleaved=True, impl=impl)
        return inputs["pages"], inputs["q"]

    def plain(inputs: Inputs) -> tuple[Tensor, Tensor]:
        return run(inputs, "reference")

    def error(inputs: Inputs, out: tuple[Tensor, Tensor]) -> float:
        wide = {name: value.double() if value.dtype == torch.bfloat16 else value for name, value in inputs.items()}
        return max(relative_error(part, exact) for part, exact in zip(out, plain(wide), strict=True))

    arms = {
        "cuda": Arm(run, error, 1e-2, goal=True),
        # Its index of used rows has a length that only the host knows, so no graph can hold it.
        "torch": Arm(plain, error, 2e-2, graph=False, own=False),
    }
    sizes = {"streams": streams, "rows": rows, "heads": heads}
    cost = norm_rope_cost(streams * rows, heads, LATENT, ROPE)
    return Case("norm_rope", sizes, make, arms, lambda _: cost, cost.bytes, default)
