"""Tokens per round of DDTree at every budget, and of AR, from one recording; no model is run."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import pandas as pd

from kdlab.checks import check_int
from kdlab.decode.field import DraftField
from kdlab.errors import ArgumentError
from kdlab.study.path_rank import min_budget
from kdlab.study.walk import check_field, sweep_row, sweep_table
from kdlab.tree import MAX_BUDGET

Number = TypeVar("Number", int, float)


def sweep(field: DraftField, budgets: Sequence[int], truncated: bool = False) -> pd.DataFrame:
    """Walk the recorded text at every budget.

    Args:
        field: recorded draft field with K candidates a slot.
        budgets: distinct tree budgets, nodes without the root, 0 to MAX_BUDGET.
        truncated: allow budgets above K where K is less than the vocabulary; those rows are exact for a decoder with
            the same K and are marked in the column `truncated`.

    Returns:
        One row a (budget, prompt) with the columns of `kdlab.study.walk.COLUMNS`: among them budget, rows (budget + 1),
        prompt (its index), prompt_id, kind, num_rounds, tokens_per_round (mean; NaN with no round; accepted draft
        tokens + the bonus), round_lengths (list). method is "ddtree", setting the budget.

    Raises:
        ArgumentError: no budget, one twice, one that is no integer or out of range, or one above K without `truncated`.
    """
    check_field(field)
    checked = check_settings("budgets", budgets, partial(check_int, minimum=0, maximum=MAX_BUDGET))
    over = [] if field.whole_vocabulary else [budget for budget in checked if budget > field.top_k]
    if over and not truncated:
        expected = f"at least {max(over)} for budget {max(over)}, or truncated=True"
        raise ArgumentError("field.top_k", expected, field.top_k)
    rows = []
    needed = min_budget(field, max_budget=max(checked))
    for budget in checked:
        arm = {"method": "ddtree", "setting": budget, "budget": budget, "truncated": budget in over}
        for prompt, prompt_needed in zip(field.prompts, needed, strict=True):
            rows.append(sweep_row(prompt, (prompt_needed <= budget).sum(axis=1), arm))
    return sweep_table(field, rows)


def sweep_ar(field: DraftField) -> pd.DataFrame:
    """Rounds of plain one-token decoding, as rows of the same table (method "ar", setting 0, one row a prompt)."""
    check_field(field)
    arm = {"method": "ar", "setting": 0, "budget": 0, "truncated": False}
    rows = [sweep_row(prompt, np.zeros(len(prompt.output_ids), dtype=np.int64), arm) for prompt in field.prompts]
    return sweep_table(field, rows)


def chosen_budgets(budget: object, default: Sequence[int]) -> list[int]:
    """Return the tree budgets that a notebook's parameter `budget` names.

    Args:
        budget: None, one budget, or a list of them.
        default: what None stands for.

    Raises:
        ArgumentError: no budget, one twice, or one that is no whole number from 1 to MAX_BUDGET.
    """
    named = default if budget is None else budget if isinstance(budget, list | tuple) else [budget]
    return check_settings("budget", named, partial(check_int, minimum=1, maximum=MAX_BUDGET))


def check_settings(name: str, values: object, check: Callable[[str, object], Number]) -> list[Number]:
    """Return `values`, each passed through `check(name, value)`; ArgumentError for no list, no value, or one twice."""
    if not isinstance(values, Iterable):
        raise ArgumentError(name, "a list of numbers", repr(values))
    checked = [check(name, value) for value in values]
    if not checked:
        raise ArgumentError(name, "at least one value", "none")
    twice = sorted({value for value in checked if checked.count(value) > 1})
    if twice:
        raise ArgumentError(name, "distinct values", f"{twice[0]} more than once")
    return checked
