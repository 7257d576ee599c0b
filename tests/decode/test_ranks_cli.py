"""`--ranks N` starts N processes; one of them prints, once, what one rank alone prints."""

import json
import subprocess
import sys

import pytest

from kdlab.cli import main

LINE = ["generate", "--prompt", "the cat ", "--target", "tiny", "--max-new-tokens", "12", "--json"]


def test_ranks_print_one_document(capsys):
    assert main(LINE) == 0
    alone = json.loads(capsys.readouterr().out)
    command = [sys.executable, "-m", "kdlab.cli", *LINE, "--ranks", "2", "--experts", "ep"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    assert together["prompts"] == alone["prompts"]
    assert (alone["provenance"]["ranks"], together["provenance"]["ranks"]) == (1, 2)


@pytest.mark.parametrize("wrong", [["--ranks", "0"], ["--experts", "pp"]])
def test_wrong_ranks_are_refused(wrong, capsys):
    assert main([*LINE, *wrong]) == 2
    assert wrong[0].strip("-") in capsys.readouterr().err
