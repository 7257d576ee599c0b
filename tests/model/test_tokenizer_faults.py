"""Malformed tokenizer files: refused with the file and the key named."""

import json

import pytest

from kdlab.errors import ArgumentError, ConfigError
from kdlab.model.tokenizer import load_tokenizer
from tests.model.kimi_files import BYTES, write_kimi


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"300": {"content": 5}}}, {"added_tokens_decoder": {"9" * 5000: {"content": "a"}}},
        {"added_tokens_decoder": {"300": "a"}}, {"added_tokens_decoder": []}, {"eos_token": 5}, {"eos_token": [1]},
        {"eos_token": {"content": [1]}}, {"eos_token": "<unknown>"},
    ],
)  # fmt: skip
def test_malformed_settings_are_named(settings, tmp_path):
    write_kimi(tmp_path, BYTES, 256)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json.*expected"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("vocab_size", [10**6, 2**31 - 1, 10**9, 2**70])
def test_a_mistyped_vocabulary_is_refused_before_it_takes_memory(vocab_size, tmp_path):
    with pytest.raises(ConfigError, match=f"vocab_size.*{vocab_size}"):
        load_tokenizer(write_kimi(tmp_path, BYTES, 256, config={"vocab_size": vocab_size}))


def test_an_unknown_end_token_is_refused_where_no_other_stop_is_known(tmp_path):
    assert load_tokenizer(write_kimi(tmp_path, BYTES, 256, eos="<unknown>")).stop_token_ids == {257, 258, 265}
    write_kimi(tmp_path, BYTES, 256, names={"[BOS]": 0})
    with pytest.raises(ConfigError, match=r"eos_token: expected a known token, got '\[EOS\]'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("directory", [None, 5, "a" * 5000, "a\0b"])
def test_what_is_no_directory_is_refused(directory):
    with pytest.raises(ArgumentError, match="tokenizer directory: expected an existing directory"):
        load_tokenizer(directory)
