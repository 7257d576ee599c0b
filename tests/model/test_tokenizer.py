"""Tokenizers: Kimi's tiktoken file on a toy vocabulary, tokenizer.json, characters, and what a directory decides."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kdlab.errors import ArgumentError, ConfigError
from kdlab.model.tiktoken_tokenizer import split_long_text
from kdlab.model.token_text import printable
from kdlab.model.tokenizer import load_tokenizer
from kdlab.paths import DATA
from tests.model.kimi_files import BYTES, K2_NAMES, write_kimi

WORDS = [b"th", b"the", b" the", b"in", b"ing", "中".encode()[:2], "中".encode()]


@pytest.fixture
def toy(tmp_path):
    return load_tokenizer(write_kimi(tmp_path, BYTES + WORDS, 255))


def test_merges_are_applied_and_decoded(toy):
    ids = toy.encode("the thing 中")
    assert ids == [257, 32, 256, 260, 32, 262]
    assert toy.decode(ids) == "the thing 中"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("I'm you'LL", ["I'm", " you'LL"]),
        ("ab中文cd", ["ab", "中文", "cd"]),
        ("12345", ["123", "45"]),
        ("x=1", ["x", "=", "1"]),
        ("a  b", ["a", " ", " b"]),
        ("a\n\n b", ["a", "\n\n", " b"]),
        ("camelCaseHTTPServer", ["camel", "Case", "HTTPServer"]),
        ("end.\nNext", ["end", ".\n", "Next"]),
        ("tail  ", ["tail", "  "]),
        ("$abc ##", ["$abc", " ##"]),
        ("naïve Ünder 한국어", ["naïve", " Ünder", " 한국어"]),
    ],
    ids=repr,
)
def test_text_is_split_before_merging(tmp_path, text, pieces):
    # Every piece is a token, and so are the joins of neighbours: a missed cut would pick one of those.
    joins = [a + b for a, b in itertools.pairwise(pieces)] + [text]
    words = [t for t in dict.fromkeys(s.encode() for s in pieces + joins) if len(t) > 1]
    tokens = BYTES + words
    tokenizer = load_tokenizer(write_kimi(tmp_path, tokens, 255))
    assert [tokens[i] for i in tokenizer.encode(text)] == [piece.encode() for piece in pieces]


def test_typed_markers_stay_text(toy):
    for name in K2_NAMES:
        ids = toy.encode(f"a{name}b")
        assert max(ids) < len(BYTES + WORDS)
        assert toy.decode(ids) == f"a{name}b"


def test_special_ids_follow_the_ranks(toy):
    base = len(BYTES + WORDS)
    assert toy.vocab_size == base + 255
    assert toy.special_tokens["<|im_end|>"] == base + 2
    assert toy.special_tokens[f"<|reserved_token_{base + 3}|>"] == base + 3
    assert len(toy.special_tokens) == 255
    assert toy.decode([base + 3]) == f"<|reserved_token_{base + 3}|>"


def test_number_of_specials_is_256_without_a_config(tmp_path):
    write_kimi(tmp_path, BYTES, 255)
    (tmp_path / "config.json").unlink()
    assert load_tokenizer(tmp_path).vocab_size == 512


def test_decode_is_total(toy):
    assert toy.decode([0xE4, 97, 0xFF]) == "�a�"
    for token in range(toy.vocab_size):
        assert isinstance(toy.decode([token]), str)
        text = toy.token_text(token)
        assert text
        assert text.isprintable()
        assert " " not in text


def test_skipping_specials_keeps_the_think_markers(toy):
    names = toy.special_tokens
    ids = [names["<think>"], 97, names["</think>"], 98, names["<|im_end|>"], toy.vocab_size - 2]
    assert toy.decode(ids, skip_special=True) == "<think>a</think>b"
    assert toy.decode(ids) == f"<think>a</think>b<|im_end|><|reserved_token_{toy.vocab_size - 2}|>"


def test_token_text_shows_blanks_and_half_characters(toy):
    assert toy.token_text(258) == "␣the"
    assert toy.token_text(10) == "⏎"
    assert toy.token_text(0) == r"\x00"
    assert toy.token_text(261) == r"\xe4\xb8"
    assert toy.token_text(262) == "中"
    assert printable("a\tb \n") == "a\\tb␣⏎"


@pytest.mark.parametrize("token", [-1, 518, True, 1.0])
def test_ids_outside_the_vocabulary_are_refused(toy, token):
    with pytest.raises(ArgumentError, match="token id"):
        toy.decode([token])
    with pytest.raises(ArgumentError, match="token id"):
        toy.token_text(token)


def test_kimi_ids_at_full_size(tmp_path):
    tokens = BYTES + [bytes([1 + i // 65536, i // 256 % 256, i % 256]) for i in range(163_584 - 256)]
    config = {"eos_token_id": 163586, "text_config": {"eos_token_id": 163586, "vocab_size": 163840}}
    tokenizer = load_tokenizer(write_kimi(tmp_path, tokens, 256, config=config))
    assert tokenizer.vocab_size == 163840
    assert tokenizer.stop_token_ids == {163585, 163586, 163593}
    for name, token in {"<think>": 163606, "</think>": 163607, "<|im_end|>": 163586, "[UNK]": 163838}.items():
        assert tokenizer.special_tokens[name] == token
        assert tokenizer.decode([token]) == name
    assert tokenizer.decode(tokenizer.encode("The <think> tag")) == "The <think> tag"


def test_stop_ids_are_the_union_of_all_sources(tmp_path):
    base, size = len(BYTES), len(BYTES) + 255
    config = {"eos_token_id": [base + 40], "text_config": {"eos_token_id": base + 41, "vocab_size": size}}
    names = K2_NAMES | {"<|stop|>": 43}
    generation = {"eos_token_id": [base + 42, base + 2]}
    write_kimi(tmp_path, BYTES, 255, config=config, names=names, eos={"content": "<|stop|>"}, generation=generation)
    assert load_tokenizer(tmp_path).stop_token_ids == {base + i for i in (40, 41, 42, 43, 1, 2, 9)}


def cut_by_hand(text, chunk, run):
    """The rule character by character, as an oracle."""
    for begin in range(0, len(text), chunk):
        part, start, length, previous = text[begin : begin + chunk], 0, 0, None
        for i, character in enumerate(part):
            length = length + 1 if character.isspace() == previous else 1
            previous = character.isspace()
            if length > run:
                yield part[start:i]
                start, length = i, 1
        yield part[start:]


@given(st.text(alphabet="ab \n\u3000中", max_size=60), st.integers(1, 20), st.integers(1, 7))
def test_long_texts_are_cut_by_the_rule(text, chunk, run):
    pieces = list(split_long_text(text, chunk=chunk, run=run))
    assert pieces == list(cut_by_hand(text, chunk, run))
    assert "".join(pieces) == text


def test_long_runs_do_not_overflow(toy):
    text = "x" * 60_000 + " " * 60_000 + "the " * 90_000
    assert toy.decode(toy.encode(text)) == text
    assert toy.encode("") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== 0\nnot-base64! 1\n", r"tiktoken.model:2"),
        (b"YQ== 0\nYg==\n", r"tiktoken.model:2"),
        (b"YQ== 0\nYg== 2\n", "ranks 0..1"),
        (b"YQ== 0\nYQ== 1\n", "ranks 0..0"),
        (b"YQ== 0\n", "every single byte"),
        (b"", "ranks"),
    ],
)
def test_malformed_ranks_are_refused(tmp_path, content, message):
    write_kimi(tmp_path, BYTES, 256)
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


def test_contradicting_files_are_refused(tmp_path):
    write_kimi(tmp_path, BYTES, 256, config={"vocab_size": 255})
    with pytest.raises(ConfigError, match="vocab_size 255"):
        load_tokenizer(tmp_path)
    write_kimi(tmp_path, BYTES, 20)
    with pytest.raises(ConfigError, match="<think>"):
        load_tokenizer(tmp_path)
    write_kimi(tmp_path, BYTES, 256, config={"vocab_size": 512, "eos_token_id": 512})
    with pytest.raises(ConfigError, match="eos_token_id"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_tokenizer(tmp_path)


@pytest.fixture
def json_directory(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(["the thing in the sea"] * 9, trainer)
    inner.add_special_tokens(["<eos>", "<bos>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", inner.token_to_id("<bos>"))]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 400, "eos_token_id": 7}))
    return tmp_path


def test_tokenizer_json(json_directory):
    inner = tokenizers.Tokenizer.from_file(str(json_directory / "tokenizer.json"))
    tokenizer = load_tokenizer(json_directory)
    text = "the thing 中 <eos>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[:2] == inner.encode("the thing", add_special_tokens=False).ids
    eos = inner.token_to_id("<eos>")
    assert eos not in ids
    assert inner.token_to_id("<bos>") not in ids
    assert tokenizer.special_tokens["<eos>"] == eos
    assert tokenizer.vocab_size == 400
    assert tokenizer.stop_token_ids == {7, eos}
    assert tokenizer.decode([ids[0], eos]) == "the<eos>"
    assert tokenizer.decode([ids[0], eos], skip_special=True) == "the"
    for token in range(400):
        assert isinstance(tokenizer.decode([token]), str)
        assert tokenizer.token_text(token).isprintable()
    assert tokenizer.token_text(399) == "<399>"


def test_tokenizer_json_must_fit_the_model(json_directory):
    (json_directory / "config.json").write_text(json.dumps({"vocab_size": 100}))
    with pytest.raises(ConfigError, match="vocab_size 100"):
        load_tokenizer(json_directory)
    (json_directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(json_directory)


def test_characters_of_the_tiny_pair():
    tokenizer = load_tokenizer(DATA / "tiny-pair" / "target")
    text = "12+30=42; the king\n"
    assert tokenizer.encode(text) == [ord(c) for c in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 128
    assert tokenizer.stop_token_ids == {2}
    assert [tokenizer.token_text(i) for i in (32, 10, 2, 97)] == ["␣", "⏎", r"\x02", "a"]
    assert all(tokenizer.token_text(i).isprintable() for i in range(128))


def test_a_character_outside_the_vocabulary_is_named():
    tokenizer = load_tokenizer(DATA / "tiny-pair" / "target")
    with pytest.raises(ArgumentError, match=r"'é' \(U\+00E9\) at character 3"):
        tokenizer.encode("café")
    with pytest.raises(ArgumentError, match="token id"):
        tokenizer.decode([128])


def test_characters_decode_surrogates_to_a_replacement(tmp_path):
    settings = {"tokenizer_class": "CharacterTokenizer", "vocab_size": 0x110000}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([0xD800, 0x4E2D]).encode() == "�中".encode()


def test_a_directory_without_a_tokenizer_says_what_was_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"tiktoken.model, tokenizer.json, and a tokenizer_config.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ArgumentError, match="existing directory"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CharacterTokenizer"}))
    with pytest.raises(ConfigError, match="vocab_size"):
        load_tokenizer(tmp_path)
