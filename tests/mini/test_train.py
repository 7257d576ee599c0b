"""The whole training in small: target, export, drafters, export, and a decode of the result through the public API."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kdlab
from kdlab.mini.corpus import KINDS
from kdlab.mini.evaluate import evaluate, headlines
from kdlab.mini.shape import SMOKE
from kdlab.paths import DATA


def _train(stage: str, tokens: Path, root: Path, steps: int) -> str:
    command = [sys.executable, "-m", "kdlab.mini.train", "--smoke", "--device", "cpu", "--stage", stage]
    command += ["--steps", str(steps)]
    command += ["--tokens", str(tokens), "--out", str(root / "out"), "--state", str(root / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("trained")
    return root / "out", _train("target", token_folder, root, 20) + _train("drafters", token_folder, root, 10)


def test_files_are_in_the_original_formats(trained: tuple[Path, str]) -> None:
    out, _ = trained
    index = json.loads((out / "target/model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 3
    assert all(name.startswith("language_model.") for name in index)
    assert sum(name.endswith(".weight_packed") for name in index) == 3 * SMOKE.num_experts * (SMOKE.num_layers - 1)
    assert "text_config" in json.loads((out / "target/config.json").read_text())


@pytest.mark.parametrize("size", [8, 16])
def test_pair_decodes_the_same_text_as_ar(trained: tuple[Path, str], size: int) -> None:
    out, _ = trained
    pair = kdlab.load_pair(out / "target", out / f"drafter-b{size}", dtype="float64")
    options = dict(max_new_tokens=24, stop_token_ids=[])
    tree = kdlab.generate(pair, "Problem: Mia has 12 boxes.", method="ddtree", budget=16, **options)
    plain = kdlab.generate(pair, "Problem: Mia has 12 boxes.", method="ar", **options)
    assert tree.output_ids == plain.output_ids
    assert pair.drafter is not None
    assert pair.drafter.config.block_size == size


def test_progress_says_speed_and_losses(trained: tuple[Path, str]) -> None:
    _, output = trained
    assert "M tok/s" in output
    assert "loss_held_out" in output
    assert "chain tokens per anchor" in output


def test_evaluation_makes_one_row_a_block_size_temperature_and_kind(trained: tuple[Path, str]) -> None:
    out, _ = trained
    table = evaluate(out, DATA / "prompts", per_kind=1, max_new_tokens=16, device="cpu")
    assert len(table) == 2 * 2 * len(KINDS)
    assert (table["tree_64"] >= table["tree_8"]).all()
    assert (table["experts_65"] >= table["experts_1"]).all()
    assert table["loss_held_out"].notna().all()
    assert len(headlines(table)) == 1 + (0 if table["loop"].all() else 2)
