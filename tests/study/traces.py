"""The worked examples of docs/traces.md, and traces made up for a test."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from kdlab import study
from kdlab.decode.field import DraftField
from tests.study.fields import draft_field

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\S+) -->\n```json\n(.*?)```", PAGE, re.DOTALL))
ROUNDS = EXAMPLES["rounds.jsonl"].splitlines()
PROVENANCE = json.loads(ROUNDS[0])["provenance"]
KIND = {"kdlab_kind": "trace_rounds", "kdlab_schema_version": 1}


def made_trace(num_prompts=6, **provenance):
    rng = np.random.default_rng(3)
    rows = [
        {"prompt_id": f"q{prompt}", "kind": "code", "round": number, "accepted": int(rng.integers(0, 8)), "drafted": 7}
        for prompt in range(num_prompts)
        for number in range(4)
    ]
    return study.round_trace(rows, PROVENANCE | provenance)


def known_field(**options) -> DraftField:
    field = draft_field(**options)
    return replace(
        field, provenance={key: value for key, value in PROVENANCE.items() if key not in ("method", "budget")}
    )
