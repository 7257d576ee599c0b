"""The mini's own byte-level BPE: trained on a sample of all kinds, single digits, Kimi's special tokens at the end."""

import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from kdlab.mini.corpus import KINDS, SEPARATOR

VOCAB_SIZE = 3072
# Kimi's control tokens in Kimi's order, so that the chat prompt of the real model runs on the mini as well.
SPECIAL = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<think>", "</think>", "[UNK]", "[PAD]",
)  # fmt: skip
# Single digits make sums learnable; a run of blanks keeps its last one for the word behind it.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SAMPLE_CHARS = {"code": 14_000_000, "math": 2_000_000, "structured": 4_000_000, "prose": 6_000_000}


def special_ids(vocab_size: int = VOCAB_SIZE) -> dict[str, int]:
    """Return the ids of the special tokens: the last ones of the vocabulary."""
    return {name: vocab_size - len(SPECIAL) + i for i, name in enumerate(SPECIAL)}


def train_tokenizer(text: Path, vocab_size: int = VOCAB_SIZE) -> tokenizers.Tokenizer:
    """Train on a sample of the training text in `text`.

    Raises:
        ValueError: the sample gives fewer merges than the vocabulary has room for.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_sample(text), trainer)
    if tokenizer.get_vocab_size() != vocab_size - len(SPECIAL):
        raise ValueError(f"text: expected {vocab_size - len(SPECIAL)} tokens, got {tokenizer.get_vocab_size()}")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def _sample(text: Path) -> Iterator[str]:
    for kind in KINDS:
        size = 0
        for document in (text / f"{kind}.train.txt").read_text(encoding="utf-8").split(SEPARATOR):
            yield document
            size += len(document)
            if size > _SAMPLE_CHARS[kind]:
                break


def save_tokenizer(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, without the pieces' merges formatted a line each."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config: dict[str, str | bool] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    config["clean_up_tokenization_spaces"] = False
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
