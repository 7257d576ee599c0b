"""Cases of the ops that read logits: draft_topk and target_sample."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kdlab.bench.kernels.case import (
    DEPTH_LIMIT,
    TOP_K,
    VOCAB_SIZE,
    Arm,
    Case,
    Inputs,
    normal,
    relative_error,
    wrong_share,
)
from kdlab.kernels import reference
from kdlab.kernels.draft_topk import draft_topk, draft_topk_cost
from kdlab.kernels.target_sample import target_sample, target_sample_cost

_STD = 3.0  # spread of a language model's logits, about


def topk_cases() -> Iterator[Case]:
    """The draft's candidates, for one stream and for eight."""
    for streams in (1, 8):
        yield topk_case(streams, DEPTH_LIMIT, VOCAB_SIZE, TOP_K)
    for k in (8, 256):
        yield topk_case(1, DEPTH_LIMIT, VOCAB_SIZE, k, default=False)


def topk_case(streams: int, rows: int, vocab: int, k: int, *, default: bool = True) -> Case:
    """draft_topk beside torch's topk and logsumexp."""

    def make(seed: int) -> Inputs:
        return {"logits": normal(streams, rows, vocab, seed=seed, std=_STD)}

    def error(inputs: Inputs, out: tuple[Tensor, ...]) -> float:
        return relative_error(out[0], reference.draft_topk(inputs["logits"].double(), k).log_probs.double())

    def exact_error(inputs: Inputs, out: tuple[Tensor, ...]) -> float:
        return max(error(inputs, out), wrong_share(out[1], reference.draft_topk(inputs["logits"], k).token_ids))

    def torch_topk(inputs: Inputs) -> tuple[Tensor, Tensor]:
        values, token_ids = inputs["logits"].topk(k)
        return values.float() - inputs["logits"].float().logsumexp(-1, keepdim=True), token_ids

    arms = {
        "cuda": Arm(lambda inputs: draft_topk(inputs["logits"], k), exact_error, 1e-5, goal=True),
        "torch": Arm(torch_topk, error, 1e-5, own=False),
    }
    sizes = {"streams": streams, "rows": rows, "vocab": vocab, "k": k}
    cost = draft_topk_cost(streams, rows, vocab, k, dtype=torch.bfloat16)
    return Case("draft_topk", sizes, make, arms, lambda _: cost, 2 * streams * rows * vocab, default)


def sample_cases() -> Iterator[Case]:
    """Verify rows of one stream to eight, greedy and at temperature 1, where the whole row is noise and sum."""
    for rows in (1, 33, 65, 264):
        for temperature in (0.0, 1.0):
            yield sample_case(rows, VOCAB_SIZE, temperature, 1.0)
    yield sample_case(33, VOCAB_SIZE, 1.0, 0.95, default=False)


def sample_case(rows: int, vocab: int, temperature: float, top_p: float, *, default: bool = True) -> Case:
    """target_sample beside torch: argmax, or softmax and multinomial, whose draws no seed makes equal to ours."""
    streams = 8 if rows == 264 else 1

    def make(seed: int) -> Inputs:
        shape = (streams, rows // streams)
        return {
            "logits": normal(*shape, vocab, seed=seed, std=_STD),
            "stream": torch.arange(streams, device="cuda"),
            "position": torch.arange(rows, device="cuda").view(shape),
        }

    def sample(inputs: Inputs, impl: str = "cuda") -> Tensor:
        return target_sample(**inputs, temperature=temperature, top_p=top_p, seed=1, impl=impl)

    def error(inputs: Inputs, out: Tensor) -> float:
        return wrong_share(out, sample(inputs, "reference"))

    def torch_argmax(inputs: Inputs) -> Tensor:
        return inputs["logits"].argmax(-1)

    def argmax_error(inputs: Inputs, out: Tensor) -> float:
        """torch does not say which of equal logits it takes."""
        return wrong_share(inputs["logits"].gather(-1, out[..., None])[..., 0], inputs["logits"].amax(-1))

    def torch_multinomial(inputs: Inputs) -> Tensor:
        return (inputs["logits"].float() / temperature).softmax(-1).flatten(0, 1).multinomial(1)

    def range_error(inputs: Inputs, out: Tensor) -> float:
        return float(((out < 0) | (out >= vocab)).double().mean())

    arms = {"cuda": Arm(sample, error, goal=True)}
    if temperature == 0.0:
        arms["torch argmax"] = Arm(torch_argmax, argmax_error, own=False)
    elif top_p == 1.0:
        arms["torch multinomial"] = Arm(torch_multinomial, range_error, graph=False, own=False)
    sizes = {"streams": streams, "rows": rows // streams, "vocab": vocab, "temperature": temperature, "top_p": top_p}
    cost = target_sample_cost(streams, rows // streams, vocab, dtype=torch.bfloat16)
    return Case("target_sample", sizes, make, arms, lambda _: cost, 2 * rows * vocab, default)
