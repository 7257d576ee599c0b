"""Rounds out of what SGLang and vLLM return with a request: their speculative counters, checked against each other.

SGLang: `meta_info` of /generate or of a choice, or `sglext.spec_tokens_details` of a chat completion that asked for
`return_spec_tokens_details`. `spec_verify_ct` counts rounds, `spec_correct_drafts_histogram[j]` (first named
`spec_accept_histogram`) those that accepted j draft tokens; `spec_num_proposed_drafts` (once `spec_proposed_drafts` or
`spec_draft_token_num`) is spec_verify_ct times the drafted tokens of a round. `spec_accept_length` is completion tokens
over spec_verify_ct. The prefill's own token may be in it, and what a stop cut off is not: it is no mean over rounds and
is not used. Sources: sgl-project/sglang, python/sglang/srt/managers/tokenizer_manager.py, pull requests 18332, 33518.

vLLM: `metrics.speculative_decoding` of a response, from a server with `--per-request-spec-decode-metrics summary` or
`detailed`. `acceptance_histogram[j]` counts the steps that accepted j draft tokens,
`acceptance_histogram_by_draft_length[k][j]` those of k drafted; with `detailed`, `per_step_accepted` and
`per_step_drafted` keep the order. Steps for which nothing was drafted are in none of them. Source: vllm-project/vllm,
docs/features/speculative_decoding/acceptance_metrics.md.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from kdlab.checks import check_choice
from kdlab.decode.run_row import COUNT
from kdlab.errors import SchemaError
from kdlab.study.traces.rounds import RoundTrace, round_trace

_Round = tuple[int, int]  # accepted, drafted
_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_MOST_ROUNDS = 1_000_000  # of one request: more than any context holds, and few enough to write out
_WRAPPER = ("prompt_id", "kind", "response")


def import_responses(
    engine: str, responses: Iterable[object], provenance: Mapping[str, Any], *, kind: str = "text"
) -> RoundTrace:
    """Make a trace of the responses of an engine, one request each.

    Args:
        engine: "sglang" or "vllm".
        responses: each as the engine returned it, or an object {"prompt_id", "kind", "response"} around it.
        provenance: what `docs/traces.md` asks for; `budget` must be what the engine drafts a round at most.
        kind: of the text of responses that do not say it.

    Returns:
        The trace. Its provenance gains `round_order`: "measured", or "unknown" where only histograms were there (then
        the rounds of a prompt stand by accepted length), and `requests_without_rounds`, which leave nothing in it.

    Raises:
        ArgumentError: no such engine.
        SchemaError: a response without the counters, or with counters that contradict each other, by its number; or
            the provenance lacks something.
    """
    check_choice("engine", engine, tuple(_READERS))
    rows: list[dict[str, Any]] = []
    ordered, silent = True, 0
    for number, response in enumerate(responses, start=1):
        where = f"response {number}"
        prompt_id, own_kind, body = _unwrapped(where, response, kind)
        rounds, is_ordered = _READERS[engine](where, body)
        ordered, silent = ordered and is_ordered, silent + (not rounds)
        rows += [
            {"prompt_id": prompt_id or f"request-{number}", "kind": own_kind, "round": index, "accepted": accepted,
             "drafted": drafted, "parents": None}
            for index, (accepted, drafted) in enumerate(rounds)
        ]  # fmt: skip
    more = {"round_order": "measured" if ordered else "unknown", "requests_without_rounds": silent}
    return round_trace(rows, {**provenance, **more})


def _unwrapped(where: str, response: object, kind: str) -> tuple[str | None, str, Mapping[str, Any]]:
    if not isinstance(response, Mapping):
        raise SchemaError(f"{where}: expected an object, got {response!r:.60}")
    if "response" not in response:
        return None, kind, response
    body = response["response"]
    if not isinstance(body, Mapping) or set(response) - set(_WRAPPER):
        raise SchemaError(f"{where}: expected {', '.join(_WRAPPER)}, with an object as response, got {response!r:.60}")
    return response.get("prompt_id"), response.get("kind", kind), body


def _sglang_rounds(where: str, response: Mapping[str, Any]) -> tuple[list[_Round], bool]:
    details = _sglang_details(where, response)
    if details.get("spec_verify_ct") is None and details.get("completion_tokens") in (0, 1):
        return [], False  # the prefill wrote all of it: SGLang gives counters only to requests with a round
    num_rounds = _count(where, details, ("spec_verify_ct",))
    histogram = _first(details, _HISTOGRAMS)
    if not histogram:
        raise SchemaError(f"{where}: {_HISTOGRAMS[0]}: expected the rounds by accepted tokens, got only their totals;"
                          " SGLang returns it since February 2026")  # fmt: skip
    _check_histogram(where, histogram, num_rounds, _count(where, details, _ACCEPTED))
    proposed = _count(where, details, _PROPOSED)
    if num_rounds and proposed % num_rounds:
        raise SchemaError(f"{where}: {_PROPOSED[0]}: expected a multiple of {num_rounds} rounds, got {proposed}")
    caps = details.get("spec_cap_lens_histogram") or []
    if not _is_counts(caps) or sum(map(bool, caps)) > 1:
        raise SchemaError(f"{where}: spec_cap_lens_histogram: expected one draft length, got rounds of several, whose"
                          " lengths SGLang does not return")  # fmt: skip
    return _spread(where, histogram, proposed // max(1, num_rounds)), False


def _sglang_details(where: str, response: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = response.get("choices")
    choices = choices if isinstance(choices, list) else []
    if len(choices) > 1:
        raise SchemaError(f"{where}: choices: expected one, got {len(choices)}")
    extension = response.get("sglext")
    places = [response.get("meta_info")]
    places += [extension.get("spec_tokens_details")] if isinstance(extension, Mapping) else []
    places += [choice.get("meta_info") for choice in choices if isinstance(choice, Mapping)]
    for place in places:
        if not isinstance(place, Mapping):
            continue
        if "spec_verify_ct" in place or place.get("completion_tokens") in (0, 1):
            return place
    expected = "meta_info or sglext.spec_tokens_details with spec_verify_ct"
    raise SchemaError(f"{where}: expected {expected}, got the keys {', '.join(map(str, response))}")


def _vllm_rounds(where: str, response: Mapping[str, Any]) -> tuple[list[_Round], bool]:
    metrics = response.get("metrics")
    details = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if not isinstance(details, Mapping):
        expected = "metrics.speculative_decoding (--per-request-spec-decode-metrics, and n = 1)"
        raise SchemaError(f"{where}: expected {expected}, got {details!r:.60}")
    num_rounds = _count(where, details, ("num_spec_steps",))
    num_accepted = _count(where, details, ("num_accepted_draft_tokens",))
    num_drafted = _count(where, details, ("num_draft_tokens",))
    is_ordered = details.get("per_step_accepted") is not None
    rounds = _vllm_steps(where, details) if is_ordered else _vllm_histograms(where, details, num_rounds, num_drafted)
    sums = len(rounds), sum(accepted for accepted, _ in rounds), sum(drafted for _, drafted in rounds)
    if sums != (num_rounds, num_accepted, num_drafted):
        names = "num_spec_steps, num_accepted_draft_tokens, num_draft_tokens"
        raise SchemaError(f"{where}: {names}: expected {sums}, the sums over its steps, got"
                          f" {(num_rounds, num_accepted, num_drafted)}")  # fmt: skip
    return rounds, is_ordered


def _vllm_steps(where: str, details: Mapping[str, Any]) -> list[_Round]:
    accepted, drafted = details["per_step_accepted"], details.get("per_step_drafted")
    if not _is_counts(accepted) or not _is_counts(drafted) or len(accepted) != len(drafted):
        raise SchemaError(f"{where}: per_step_accepted, per_step_drafted: expected counts, as many of each")
    return list(zip(accepted, drafted, strict=True))


def _vllm_histograms(where: str, details: Mapping[str, Any], num_rounds: int, num_drafted: int) -> list[_Round]:
    by_length = details.get("acceptance_histogram_by_draft_length")
    if isinstance(by_length, Mapping):
        if not all(str(length).isdecimal() and _is_counts(histogram) for length, histogram in by_length.items()):
            raise SchemaError(f"{where}: acceptance_histogram_by_draft_length: expected counts by a length")
        return [pair for length, histogram in by_length.items() for pair in _spread(where, histogram, int(length))]
    histogram, longest = details.get("acceptance_histogram"), _count(where, details, ("num_spec_tokens",))
    if not _is_counts(histogram):
        raise SchemaError(f"{where}: acceptance_histogram: expected a list of counts, got {histogram!r:.60}")
    if num_drafted != num_rounds * longest:
        expected = f"{num_rounds} steps of {longest} each without acceptance_histogram_by_draft_length"
        raise SchemaError(f"{where}: num_draft_tokens: expected {expected}, got {num_drafted}")
    return _spread(where, histogram, longest)


def _spread(where: str, histogram: list[int], drafted: int) -> list[_Round]:
    """One round for each count, by accepted length: the order that they had is not in a histogram."""
    if sum(histogram) > _MOST_ROUNDS:
        raise SchemaError(f"{where}: expected at most {_MOST_ROUNDS:,} rounds, got {sum(histogram):,}")
    return [(accepted, drafted) for accepted, count in enumerate(histogram) for _ in range(count)]


def _check_histogram(where: str, histogram: object, num_rounds: int, num_accepted: int) -> None:
    if not _is_counts(histogram):
        raise SchemaError(f"{where}: {_HISTOGRAMS[0]}: expected a list of counts, got {histogram!r:.60}")
    sums = sum(histogram), sum(accepted * count for accepted, count in enumerate(histogram))
    if sums != (num_rounds, num_accepted):
        names = f"spec_verify_ct, {_ACCEPTED[0]}"
        raise SchemaError(f"{where}: {names}: expected {sums} as in the histogram, got {(num_rounds, num_accepted)}")


def _first(details: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((details[name] for name in names if details.get(name) is not None), None)


def _count(where: str, details: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _first(details, names)
    if not COUNT[1](value):
        raise SchemaError(f"{where}: {names[0]}: expected a count, got {'nothing' if value is None else repr(value)}")
    return int(value)


def _is_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(COUNT[1](value) for value in values)


_READERS: dict[str, Callable[[str, Mapping[str, Any]], tuple[list[_Round], bool]]] = {
    "sglang": _sglang_rounds,
    "vllm": _vllm_rounds,
}
