"""What the values of result rows must be: those that tables divide by, fit to, or look up in a row's case."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kdlab.column_rules import Rule, finite, is_number, json_object, json_of

_TIMES = ("s", "ms", "us", "ns")
_MOST = 1e18  # of a time or rate, whose quotients float64 still holds
POINT_METRICS = (
    "round", "floor", "loop", "row", "stage", "stage floor", "part", "part floor", "collectives", "slice",
)  # fmt: skip
"""Metrics of rounds at full width, whose case says the point."""
_COLLECTIVES = ("all_reduce", "all_gather")

Word = tuple[str, Callable[[Any], bool]]  # what is expected of a word of a case, and whether a value is that


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value < 1 << 31


_COUNT: Word = ("a count of at least 1", _is_count)
_TEXT: Word = ("a text", lambda value: isinstance(value, str))
_CONTEXT: Word = ("a count", lambda value: value == 0 or _is_count(value))
_GPUS: Word = ("a count of at least 1 where it is given", lambda value: value is None or _is_count(value))
_SHARE: Word = ("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
_EXPERTS: Word = ("'tp' or 'ep'", lambda value: value in ("tp", "ep"))
_DTYPE: Word = ("'bfloat16' or 'float32'", lambda value: value in ("bfloat16", "float32"))

_CASES: tuple[tuple[str, Collection[str], Mapping[str, Word]], ...] = (
    ("metric", POINT_METRICS, {
        "rows": _COUNT, "streams": _COUNT, "context": _CONTEXT, "g": _SHARE, "experts": _EXPERTS, "ranks": _COUNT,
        "layers": _COUNT, "gpus": _GPUS,
    }),
    ("metric", ("stage", "stage floor"), {"stage": _TEXT}),
    ("metric", ("part", "part floor"), {"stage": _TEXT, "part": _TEXT}),
    ("op", _COLLECTIVES, {"ranks": _COUNT, "rows": _COUNT, "bytes": _COUNT, "what": _TEXT, "dtype": _DTYPE}),
    ("op", ("all_reduce",), {"width": _COUNT}),
    ("op", ("ceiling",), {"of": _TEXT, "what": _TEXT}),
)  # fmt: skip
"""(Column, the values in it, words that the case of such a row must have)."""


def _case_rule(column: str, kinds: Collection[str], name: str, word: Word) -> Rule:
    expected, holds = word
    return Rule(
        ("case", column),
        f"{name!r} in it, {expected}",
        lambda case, kind: kind not in kinds or holds((json_of(case) or {}).get(name)),
    )


def _is_plain(case: str) -> bool:
    words = json_of(case)
    return words is not None and all(isinstance(word, str | bool) or is_number(word) for word in words.values())


def _divides(value: float | None, unit: str, metric: str) -> bool:
    """What a collective adds is a difference, which may be nothing, and less where the noise is larger."""
    is_time = (unit in _TIMES and metric not in ("collectives", *_COLLECTIVES)) or unit.endswith("/s")
    return value is None or not is_time or 0 < value < _MOST


def _are_finite(samples: Sequence[float | None] | None) -> bool:
    return samples is None or (bool(samples) and all(one is not None and math.isfinite(one) for one in samples))


def _is_prompt_each(prompts: Sequence[int | None] | None, samples: Sequence[float] | None) -> bool:
    return prompts is None or (samples is not None and None not in prompts and len(prompts) == len(samples))


_DIVIDES = f"a time or rate above 0 and below {_MOST:g}"

ROW_RULES: tuple[Rule, ...] = (
    Rule(("case",), "a JSON object of numbers, texts and truth values", _is_plain),
    *(_case_rule(column, kinds, name, word) for column, kinds, words in _CASES for name, word in words.items()),
    json_object("provenance"),
    *(finite(name) for name in ("value", "median", "p10", "p90")),
    *(Rule((name, "unit", "metric"), _DIVIDES, _divides) for name in ("value", "median")),
    Rule(("samples",), "at least one finite number, or nothing", _are_finite),
    Rule(("median", "samples"), "a number beside samples", lambda median, of: median is not None or of is None),
    Rule(("sample_prompts", "samples"), "a prompt for each sample, or nothing", _is_prompt_each),
)
