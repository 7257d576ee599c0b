"""Live rounds of every number of rows on a GPU, in the dtype of its kernels: about as many as a recording predicts.

In bfloat16 a near tie may fall to the other side, so rounds are not demanded to be equal one by one; a kernel that is
wrong at one number of rows costs that arm most of its acceptance, which no near tie does.
"""

import pandas as pd
import pytest

import kdlab
from kdlab.paths import REPOSITORY
from kdlab.study import check_live, sweep, sweep_ar, sweep_chains, sweep_live

ARMS = [("ar", 0), *(("chain", length) for length in (1, 2, 3, 4, 7)), ("ddtree", 7), ("ddtree", 15)]
NUM_PROMPTS, NEW_TOKENS = 4, 24


@pytest.mark.gpu
def test_rounds_of_every_number_of_rows_are_about_as_many_as_predicted():
    pair = kdlab.load_pair("bundled", device="cuda", dtype="bfloat16")
    prompts = list(kdlab.load_prompts(REPOSITORY / "data/prompts/code.jsonl"))[:NUM_PROMPTS]
    field = kdlab.record(pair, prompts, top_k=64, max_new_tokens=NEW_TOKENS)
    predicted = pd.concat([sweep(field, [7, 15]), sweep_chains(field), sweep_ar(field)], ignore_index=True)
    parts = [part for part in sweep_live(pair, prompts, ARMS, max_new_tokens=NEW_TOKENS) if part is not None]
    checks = check_live(pd.concat(parts, ignore_index=True), predicted)
    assert not checks["far"].any(), checks.to_string()
