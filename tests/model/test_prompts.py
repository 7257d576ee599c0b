"""Prompts: what a user may pass, what a file may hold, and the shipped set."""

import json

import numpy as np
import pytest
import torch

from kdlab.errors import ArgumentError
from kdlab.model.prompts import Prompt, PromptSet, as_prompt_set, load_prompts, prompt_token_ids
from kdlab.model.tokenizer import load_tokenizer
from kdlab.paths import DATA

TINY = DATA / "prompts" / "tiny.jsonl"
GOOD = '{"id": "a", "kind": "prose", "text": "one"}'


def write(tmp_path, *lines):
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_load(tmp_path):
    prompts = load_prompts(write(tmp_path, GOOD, "", '{"id": "b", "kind": "code", "token_ids": [0, 3]}'))
    assert prompts.id == "set"
    assert list(prompts) == [Prompt("a", "prose", "one"), Prompt("b", "code", token_ids=(0, 3))]
    assert len(prompts) == 2


def test_digest_is_of_the_content(tmp_path):
    first = load_prompts(write(tmp_path, GOOD))
    again = load_prompts(write(tmp_path, '{"kind":"prose",   "text":"one","id":"a"}', ""))
    assert first.digest == again.digest
    others = [
        Prompt("a", "prose", "two"),
        Prompt("b", "prose", "one"),
        Prompt("a", "code", "one"),
        Prompt("a", "prose", token_ids=(1,)),
    ]
    digests = {PromptSet.of("x", [prompt]).digest for prompt in others} | {first.digest}
    assert len(digests) == 5
    assert PromptSet.of("x", others[:2]).digest != PromptSet.of("x", others[1::-1]).digest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "JSON"),
        ("[1]", "JSON object, got list"),
        ('{"id": "b", "text": "x"}', r"missing \['kind'\]"),
        ('{"kind": "b", "text": "x"}', r"missing \['id'\]"),
        ('{"id": "b", "kind": "k"}', "neither"),
        ('{"id": "b", "kind": "k", "text": "x", "token_ids": [1]}', "both"),
        ('{"id": "b", "kind": "k", "text": ""}', "not empty"),
        ('{"id": "b", "kind": "k", "token_ids": []}', "not empty"),
        ('{"id": "b", "kind": "k", "token_ids": [1, -1]}', r"token_ids\[1\]"),
        ('{"id": "b", "kind": "k", "token_ids": [true]}', r"token_ids\[0\]"),
        ('{"id": "b", "kind": "k", "token_ids": "12"}', "token ids"),
        ('{"id": "b", "kind": "k", "text": 3}', "text"),
        ('{"id": 3, "kind": "k", "text": "x"}', "id"),
        ('{"id": "b", "kind": "", "text": "x"}', "kind"),
        ('{"id": "b", "kind": "k", "text": "x", "lang": "en"}', r"unknown \['lang'\]"),
        (GOOD, "'a' again"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path, GOOD, "", line)
    with pytest.raises(ArgumentError, match=message) as error:
        load_prompts(path)
    assert f"{path}:3" in str(error.value)


def test_empty_and_missing_files(tmp_path):
    with pytest.raises(ArgumentError, match="at least one prompt"):
        load_prompts(write(tmp_path, "", " "))
    with pytest.raises(ArgumentError, match="existing file"):
        load_prompts(tmp_path / "absent.jsonl")


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path):
    text = "a\u2028b\x0cc"
    path = write(tmp_path, json.dumps({"id": "a", "kind": "k", "text": text}, ensure_ascii=False))
    assert load_prompts(path).prompts[0].text == text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [Prompt("0", text="hi")]),
        (["hi", "ho"], [Prompt("0", text="hi"), Prompt("1", text="ho")]),
        ([5, 6], [Prompt("0", token_ids=(5, 6))]),
        ([[5], (6, 7)], [Prompt("0", token_ids=(5,)), Prompt("1", token_ids=(6, 7))]),
        (np.array([5, 6]), [Prompt("0", token_ids=(5, 6))]),
        (torch.tensor([[5], [6]]), [Prompt("0", token_ids=(5,)), Prompt("1", token_ids=(6,))]),
        ([torch.tensor([5, 0])], [Prompt("0", token_ids=(5, 0))]),
        ([np.int64(5)], [Prompt("0", token_ids=(5,))]),
        (Prompt("a", "k", "t"), [Prompt("a", "k", "t")]),
        ([Prompt("a", "k", "t"), "hi"], [Prompt("a", "k", "t"), Prompt("1", text="hi")]),
        (PromptSet.of("s", [Prompt("a", "k", "t")]), [Prompt("a", "k", "t")]),
    ],
    ids=repr,
)
def test_as_prompt_set(given, expected):
    assert list(as_prompt_set(given)) == expected
    assert all(prompt.kind == "text" for prompt in as_prompt_set("hi"))


@pytest.mark.parametrize(
    "given",
    ["", [], (), [""], [[]], None, 5, 1.5, {"a": 1}, [1, "a"], ["a", 1], [True], [1.0], [None], [[1.5]], [[-1]],
     torch.tensor([]), torch.tensor(5), [Prompt("a", text="x"), Prompt("a", text="y")], ["a", Prompt("0", text="x")]],
    ids=repr,
)  # fmt: skip
def test_as_prompt_set_refuses(given):
    with pytest.raises(ArgumentError):
        as_prompt_set(given)


def test_prompt_token_ids():
    tokenizer = load_tokenizer(DATA / "tiny-pair" / "target")
    assert prompt_token_ids(Prompt("a", text="hi"), tokenizer) == [104, 105]
    assert prompt_token_ids(Prompt("a", token_ids=(0, 127)), tokenizer) == [0, 127]
    with pytest.raises(ArgumentError, match="prompt 'a'"):
        prompt_token_ids(Prompt("a", token_ids=(128,)), tokenizer)


def test_the_shipped_set():
    prompts = load_prompts(TINY)
    kinds = ["prose", "arithmetic", "reversal", "mixed"]
    assert [prompt.kind for prompt in prompts] == kinds * 8
    golden = {case["prompt"] for case in json.loads((TINY.parents[2] / "tests/golden/rounds.json").read_text())}
    texts = {prompt.text for prompt in prompts}
    assert len(texts) == 32
    assert not texts & golden
    tokenizer = load_tokenizer(DATA / "tiny-pair" / "target")
    assert max(len(prompt_token_ids(prompt, tokenizer)) for prompt in prompts) < 128


@pytest.mark.parametrize("content", [b"\xff\xfe", '{"id": "a"}'.encode("utf-16"), b"[" * 100_000], ids=len)
def test_a_file_that_is_no_utf8_json_is_named(content, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"prompts\.jsonl"):
        load_prompts(path)


@pytest.mark.parametrize("path", [None, 5, "a" * 5000, "a\0b"])
def test_what_is_no_file_is_refused(path):
    with pytest.raises(ArgumentError, match="prompts: expected an existing file"):
        load_prompts(path)
