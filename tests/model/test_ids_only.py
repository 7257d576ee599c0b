"""A checkpoint without a tokenizer loads, decodes token ids and refuses text by name."""

import shutil

import pytest

import kdlab
from kdlab.errors import ArgumentError, ConfigError
from kdlab.model.tokenizer import NoTokenizer, load_tokenizer
from kdlab.paths import DATA
from tests.pairs import golden_rounds


@pytest.fixture
def bare_target(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "tiny-pair" / "target" / name, tmp_path / name)
    return tmp_path


def test_token_ids_are_decoded_and_text_is_refused(bare_target):
    pair = kdlab.load_pair(bare_target, DATA / "tiny-pair" / "drafter")
    case = golden_rounds()[0]
    run = kdlab.generate(pair, [case["prompt_ids"]], budget=7, max_new_tokens=20)
    expected = case["ar_output_ids"][len(case["prompt_ids"]) :][:20]
    assert run.output_ids == [expected]
    assert run.text == ["".join(f"<{token}>" for token in expected)]
    assert pair.tokenizer.stop_token_ids == {2}
    with pytest.raises(ArgumentError, match=r"token ids.*tokenizer\.json"):
        kdlab.generate(pair, case["prompt"])
    with pytest.raises(ArgumentError, match="token id"):
        pair.tokenizer.token_text(128)


def test_a_malformed_tokenizer_is_still_an_error(bare_target):
    with pytest.raises(NoTokenizer, match="looked for"):
        load_tokenizer(bare_target)
    (bare_target / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        kdlab.load_pair(bare_target)
    assert not isinstance(caught.value, NoTokenizer)
