"""What may not stand side by side is refused, with the field named."""

import math

import pandas as pd
import pytest

from kdlab.errors import ComparisonError
from kdlab.study import check_comparable, check_headline, sweep_ar
from kdlab.study.compare import COST_FIELDS, check_table
from tests.study.fields import draft_field

ROW = {
    "target_sha256": "t", "drafter_sha256": "d", "prompt_set_digest": "p", "template_hash": "h", "thinking": False,
    "max_new_tokens": 96, "temperature": 0.0, "top_p": 1.0, "streams": 1, "graph": "off", "dtype": "float32",
    "concurrency": 1, "overlap": None, "context": 0, "device": "cpu", "gpu": None, "gpu_uuid": None,
}  # fmt: skip


@pytest.mark.parametrize("name", COST_FIELDS)
def test_each_field_is_compared_and_named(name):
    check_comparable([ROW, dict(ROW)])
    with pytest.raises(ComparisonError, match=f"^{name}: "):
        check_comparable([ROW, ROW | {name: "other"}])
    rest = [field for field in COST_FIELDS if field != name]
    check_comparable([ROW, ROW | {name: "other"}], fields=rest)


def test_unknown_is_equal_to_unknown_only():
    check_comparable([ROW | {"gpu": None}, ROW | {"gpu": math.nan}, {k: v for k, v in ROW.items() if k != "gpu"}])
    with pytest.raises(ComparisonError, match="gpu"):
        check_comparable([ROW, ROW | {"gpu": "H200"}])
    check_comparable([])


def test_what_is_not_compared_may_differ():
    check_comparable([ROW | {"seed": 1, "run_id": "a"}, ROW | {"seed": 2, "run_id": "b"}])


def test_tables_are_compared_by_the_columns_they_have():
    table = pd.DataFrame([ROW, ROW | {"graph": "on"}])
    with pytest.raises(ComparisonError, match="'off' and 'on'"):
        check_table(table, fields=COST_FIELDS)
    check_table(table)
    check_table(table[["device"]], fields=COST_FIELDS)


def test_headlines_need_measured_rows():
    check_headline(sweep_ar(draft_field()))
    with pytest.raises(ComparisonError, match="1 of 3 rows"):
        check_headline(sweep_ar(draft_field(kinds=("text", "random", "code"))))
    with pytest.raises(ComparisonError, match="simulated"):
        check_headline(pd.DataFrame({"tok_s": [604.0]}))


@pytest.mark.parametrize("flag", ["simulated", "random_weights"])
def test_the_flag_comes_from_the_provenance(flag):
    field = draft_field()
    field.provenance[flag] = True
    assert sweep_ar(field)["simulated"].all()
