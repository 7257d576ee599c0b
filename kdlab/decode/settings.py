"""What a decode was asked for, checked once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kdlab.checks import check_choice, check_float, check_int
from kdlab.decode.methods import Method, make_method
from kdlab.errors import ArgumentError, NotSupported, UnsupportedDevice
from kdlab.model.pair import Pair

_DEFAULT_STREAMS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked arguments of `kdlab.generate`; see there for their meaning.

    `tail` is the number of tokens that recording decodes past the cut. `impl` chooses the attention, `op_impl` is that
    of the other ops: "auto", or "reference" where `impl` is that or the CUDA ops lack the dtype. `graph` says whether
    rounds are captured.
    """

    method: Method
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: frozenset[int]
    streams: int
    record_experts: bool
    tail: int
    impl: str
    op_impl: str
    graph: bool


def make_settings(
    pair: Pair,
    num_prompts: int,
    *,
    method: str = "ddtree",
    budget: int = 32,
    width: int | None = None,
    top_k: int | None = None,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids: Iterable[int] | None = None,
    streams: int | None = None,
    impl: str = "auto",
    graph: str = "auto",
    record_experts: bool = False,
    tail: int = 0,
) -> Settings:
    """Check every argument of a decode; see `kdlab.generate` for their meaning.

    Raises:
        ArgumentError: an argument has a wrong value.
        NotSupported: a value that this version does not run.
        UnsupportedDevice: an `impl` that needs a GPU, for a pair on the CPU.
    """
    _check_impl(pair, impl)
    if pair.drafter is None and method != "ar":
        raise ArgumentError("method", "'ar', since the pair has no drafter", repr(method))
    vocab_size = pair.target.config.vocab_size
    op_impl = "reference" if impl == "reference" or pair.dtype == torch.float64 else "auto"
    sizes = {"depth_limit": pair.depth_limit, "vocab_size": vocab_size}
    made = make_method(method, budget=budget, width=width, top_k=top_k, impl=op_impl, **sizes)
    limits = check_limits(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, streams=streams
    )
    return Settings(
        method=made,
        **limits | {"streams": min(limits["streams"] or _DEFAULT_STREAMS, num_prompts)},
        stop_token_ids=_check_stops(pair, stop_token_ids),
        record_experts=bool(record_experts),
        tail=tail,
        impl=impl,
        op_impl=op_impl,
        graph=_check_graph(pair, graph, made, op_impl),
    )


def check_limits(
    *, max_new_tokens: int, temperature: float, top_p: float, seed: int, streams: int | None
) -> dict[str, Any]:
    """Return these arguments of `kdlab.generate`, or raise ArgumentError: they can be told wrong without a pair."""
    return {
        "max_new_tokens": check_int("max_new_tokens", max_new_tokens, minimum=1),
        "temperature": check_float("temperature", temperature, minimum=0.0),
        "top_p": check_float("top_p", top_p, above=0.0, maximum=1.0),
        "seed": check_int("seed", seed, minimum=0, maximum=2**64 - 1),
        "streams": None if streams is None else check_int("streams", streams, minimum=1),
    }


def _check_impl(pair: Pair, impl: str) -> None:
    check_choice("impl", impl, ("auto", "reference", "naive", "mma", "wgmma", "flashmla"))
    if impl not in ("auto", "reference") and pair.device.type != "cuda":
        raise UnsupportedDevice(f"impl {impl!r} needs a CUDA GPU, and the pair is on {pair.device}")
    if impl not in ("auto", "reference") and pair.dtype == torch.float64:
        raise NotSupported("impl", "'auto' or 'reference' for float64", repr(impl))


def _check_graph(pair: Pair, graph: str, method: Method, op_impl: str) -> bool:
    """Return whether rounds are captured in a CUDA graph."""
    check_choice("graph", graph, ("auto", "off", "on"))
    on_gpu = pair.device.type == "cuda"
    if graph != "on":
        return graph == "auto" and on_gpu and op_impl != "reference" and method.builds_on_gpu
    if not on_gpu:
        raise UnsupportedDevice(f"graph 'on' needs a CUDA GPU, and the pair is on {pair.device}")
    if op_impl == "reference":
        raise NotSupported("graph", "'auto' or 'off' for plain torch, whose experts wait for the host", repr(graph))
    if not method.builds_on_gpu:
        what = f"{method.name!r} of {method.budget} nodes and {method.top_k} candidates"
        raise NotSupported("graph", f"'auto' or 'off' where the host builds the trees, {what}", repr(graph))
    return True


def _check_stops(pair: Pair, stop_token_ids: Iterable[int] | None) -> frozenset[int]:
    if stop_token_ids is None:
        return frozenset(pair.tokenizer.stop_token_ids)
    try:
        tokens = list(stop_token_ids)
    except TypeError as error:  # an array without axes has __iter__ too
        raise ArgumentError("stop_token_ids", "a list of token ids", repr(stop_token_ids)) from error
    largest = pair.target.config.vocab_size - 1
    return frozenset(check_int("stop_token_ids", token, minimum=0, maximum=largest) for token in tokens)
