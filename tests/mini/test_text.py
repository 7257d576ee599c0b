"""Generated texts, held-out rules, licences, repetition."""

import random
import re

import numpy as np
import pytest
import torch

from kdlab.mini import math_steps
from kdlab.mini.archives import clean_code, clean_rst, usable_code
from kdlab.mini.held_out import far_from, is_held_out, new_openings
from kdlab.mini.html_prose import page_text
from kdlab.mini.licences import admitted
from kdlab.mini.make_prompts import math_prompt, structured_prompt
from kdlab.mini.math_text import math_document
from kdlab.mini.repetition import repeats, unlikelihood
from kdlab.mini.structured_text import structured_document
from kdlab.mini.target_training import TargetPlan
from kdlab.mini.token_files import read_tokens, write_tokens
from kdlab.mini.train import plan_of
from kdlab.study import repeated_share


def test_every_written_sum_is_right() -> None:
    rng = random.Random(1)
    for _ in range(300):
        for line in re.findall(r"\b\d+ [-+*/] [\d+*/ -]*\d(?: = \d[\d+*/ -]*)+", math_document(rng)):
            values = {eval(part) for part in line.split("=")}
            assert len(values) == 1, line


def test_steps_split_into_tens_and_ones() -> None:
    assert math_steps.multiply(23, 4) == "23 * 4 = 20 * 4 + 3 * 4 = 80 + 12 = 92"
    assert math_steps.subtract(52, 17) == "52 - 17 = 52 - 10 - 7 = 42 - 7 = 35"


def test_generators_depend_on_their_seed_alone() -> None:
    for make in (math_document, structured_document):
        assert make(random.Random(4)) == make(random.Random(4)) != make(random.Random(5))


def test_held_out_rules() -> None:
    words = " ".join(f"w{i}" for i in range(60))
    other = " ".join(f"v{i}" for i in range(60))
    assert far_from([f"x {words} y"], [words, other]) == [1]
    assert new_openings([words], [words, other]) == [1]
    assert sum(is_held_out(f"file{i}", 10) for i in range(1000)) == pytest.approx(100, abs=40)


def test_cleaning() -> None:
    assert clean_code("# licence\n# more\n\nimport os  \n") == "import os\n"
    assert clean_rst(".. note:: x\n\nSee :class:`~a.B` and ``c``.\n====\n") == "See a.B and c.\n"
    html = '<div>menu</div><div role="main"><h1>T<a class="headerlink">#</a></h1><p>one\n two</p></div>'
    assert page_text(html) == "T\n\none two\n"
    assert not usable_code("x = [" + "1, " * 300 + "]")


def test_licences() -> None:
    assert admitted("BSD-3-Clause")
    assert admitted("Apache Software License")
    assert not admitted("MIT AND GPL-3.0")
    assert not admitted("")


def test_prompts_end_where_the_answer_begins() -> None:
    rng = random.Random(0)
    assert math_prompt("Problem: x\nSolution:\n1. y\n", rng) == "Problem: x\nSolution:\n"
    text = "Convert these 2 users from CSV to JSON.\n\nCSV:\na\n\nJSON:\n{}\n"
    assert structured_prompt(text, rng) == "Convert these 2 users from CSV to JSON.\n\nCSV:\na\n\nJSON:\n"


def test_repeats_marks_what_completes_a_run_seen_before() -> None:
    loop = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9] * 2 + [30, 31]])
    marked = repeats(loop, torch.ones_like(loop, dtype=torch.bool))
    assert marked[0].nonzero().flatten().tolist() == [16, 17]
    own = torch.ones_like(loop, dtype=torch.bool)
    own[0, 3] = False
    assert repeats(loop, own)[0].nonzero().flatten().tolist() == []
    assert repeated_share([loop[0].tolist()]) == pytest.approx(2 / 13)


def test_unlikelihood_pushes_marked_tokens_down() -> None:
    logits = torch.zeros(1, 3, 4, requires_grad=True)
    tokens = torch.tensor([[0, 1, 2]])
    unlikelihood(logits, tokens, torch.tensor([[False, True, False]])).backward()
    assert logits.grad[0, 0, 1] > 0
    assert logits.grad[0, 1:].abs().sum() == 0


def test_token_files_round_trip(tmp_path) -> None:
    tokens = np.array([0, 3071, 256, 255], dtype=np.uint16)
    write_tokens(tmp_path / "a.xz", tokens)
    assert np.array_equal(read_tokens(tmp_path / "a.xz"), tokens)
    with pytest.raises(ValueError, match="tokens"):
        read_tokens(tmp_path / "b.xz")


def test_plan_takes_settings_and_refuses_unknown_ones() -> None:
    plan = plan_of(TargetPlan(), {"windows": 8}, ["peak_rate=1e-3", "length=32"])
    assert (plan.windows, plan.peak_rate, plan.length) == (8, 1e-3, 32)
    with pytest.raises(ValueError, match="set"):
        plan_of(TargetPlan(), {}, ["wrong=1"])
