"""A bad value is named first: before a GPU is looked for, ranks are started or weights are read."""

import pytest

from kdlab.cli import main

GENERATE = "generate --prompt a --device cuda"
RECORD = "record --prompt a --device cuda -o never.parquet"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("bench kernels --seconds 0", "seconds"),
        ("bench kernels --heads 3", "heads"),
        ("bench round --ranks 0", "ranks"),
        ("bench round --ranks 3", "ranks: expected a number that divides"),
        ("bench round --ranks 2 --gpus 4", "ranks: expected at least 4"),
        ("bench round --layers 0", "layers"),
        ("bench round --layers 62 --gpus 2", "layers"),
        ("bench round --seconds nan", "--seconds"),
        ("bench round --seconds 0 --gpus 99", "--seconds"),
        ("bench round --gpus 0", "--gpus"),
        ("bench collectives --gpus 1", "--gpus"),
        ("bench collectives --gpus 99 --seconds 0", "--seconds"),
        ("bench rounds --prompts 0", "prompts"),
        ("bench rounds --repeats 0", "--repeats"),
        ("bench rounds --max-new-tokens 0", "--max-new-tokens"),
        ("bench rounds --target nowhere", "target"),
        ("profile round --rows 1", "rows"),
        ("profile round --streams 0", "streams"),
        ("profile round --context 0", "context"),
        ("profile round --ranks 3", "ranks"),
        ("profile round --layers 99", "layers"),
        ("profile kernels --ops nothing", "ops"),
        ("profile kernels --heads 3", "heads"),
        (f"{GENERATE} --budget -1", "budget"),
        (f"{GENERATE} --method guess", "method"),
        (f"{GENERATE} --temperature -1", "temperature"),
        (f"{GENERATE} --top-p 2", "top_p"),
        (f"{GENERATE} --seed -1", "seed"),
        (f"{GENERATE} --streams 0 --ranks 2", "streams"),
        (f"{GENERATE} --max-new-tokens 0", "max_new_tokens"),
        (f"{GENERATE} --experts half --ranks 2", "--experts"),
        (f"{GENERATE} --dtype int3", "dtype"),
        (f"{GENERATE} --target nowhere", "target"),
        (f"{RECORD} --top-k 0", "--top-k"),
        (f"{RECORD} --streams 0", "streams"),
    ],
)
def test_what_is_wrong_is_said_and_not_what_is_missing(words, named, capsys):
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kdlab: {named}")
    assert "GPU" not in said
