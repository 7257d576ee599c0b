"""Make the committed result files of schema version 1: `PYTHONPATH=. python tests/golden/make_parquet_v1.py`.

The files show what the first kdlab wrote; once a later one changes a schema they must stay as they are. Everything here
is made by hand, no model runs.
"""

from pathlib import Path

import numpy as np
import torch

from kdlab.bench.rows import bench_row, rows_frame, state_columns, write_rows
from kdlab.decode.field import DraftField, PromptField
from kdlab.decode.records import RoundRecord, Run
from kdlab.decode.storage import save_field, save_run
from kdlab.model.prompts import Prompt
from kdlab.tree import build_best_first, build_root_only

FOLDER = Path(__file__).parent
PROVENANCE = {
    "run_id": "00000000-0000-4000-8000-000000000001",
    "started_utc": "2026-11-29T12:00:00.000+00:00",
    "kdlab_version": "0.1.0",
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "git_dirty": False,
    "device": "cpu",
    "gpu": None,
    "threads": 2,
    "streams": 1,
    "graph": "eager",
    "impl": "reference",
    "dtype": "float32",
    "drafter_sha256": "d" * 64,
    "prompt_set_digest": "p" * 64,
    "temperature": 0.0,
    "stop_token_ids": [2],
    "thinking": None,
}


def example_run() -> Run:
    """Three prompts: two rounds with a tree that saw a NaN row and expert ids, one AR round, no round at all."""
    log_probs = torch.log(torch.tensor([[[0.5, 0.25], [0.75, 0.125], [0.5, 0.375]]]))
    log_probs[0, 2] = float("nan")
    token_ids = torch.tensor([[[7, 8], [9, 0], [4, 5]]], dtype=torch.int32)
    tree = build_best_first(log_probs, token_ids, 4).with_root(torch.tensor([3]))
    experts = np.arange(2 * 5 * 2, dtype=np.int16).reshape(2, 5, 2)
    target_tokens = np.array([7, 9, 6, 0, 1], np.int32)
    first = RoundRecord(0, 0, 5, tree.stream(0), target_tokens, (0, 1, 2), 6, experts, 1)
    second = RoundRecord(0, 1, 8, tree.stream(0), np.array([1, 2, 3, 4, -1], np.int32), (0,), 1, experts[:, ::-1], 1)
    root = build_root_only(1).with_root(torch.tensor([11]))
    alone = RoundRecord(1, 0, 2, root, np.array([12], np.int32), (0,), 12)
    return Run(
        prompts=[Prompt("greeting", "chat", text="héllo"), Prompt("1", token_ids=(10, 9)), Prompt("2", token_ids=(1,))],
        prompt_ids=[[1, 2, 3, 4, 5], [10, 9], [1]],
        output_ids=[[3, 7, 9, 6, 1], [11, 12], [2]],
        text=["abc\n", "<b>&", ""],
        rounds=[[first, second], [alone], []],
        finish=["length", "context", "stop"],
        provenance=PROVENANCE,
    )


def example_field() -> DraftField:
    """Two prompts of 3 and 1 positions, L = 2, K = 2, with a NaN row and a token outside the draft."""
    log_probs = np.log(np.array([[0.5, 0.25], [0.75, 0.125]], np.float32))
    first = PromptField(
        prompt=0,
        prompt_id="greeting",
        kind="chat",
        prompt_ids=np.array([1, 2, 3], np.int32),
        output_ids=np.array([4, 5, 2], np.int32),
        tail_ids=np.array([7, 8, 9], np.int32),
        num_starts=2,
        token_ids=np.arange(12, dtype=np.int32).reshape(3, 2, 2),
        log_probs=np.stack([log_probs, np.full((2, 2), np.nan, np.float32), log_probs[::-1]]),
        next_log_prob=np.array([[-0.5, -1.5], [np.nan, -2.5], [-np.inf, -0.25]], np.float32),
        next_rank=np.array([[0, 1], [9, 0], [12, 3]], np.int32),
    )
    second = PromptField(
        prompt=1,
        prompt_id="1",
        kind="text",
        prompt_ids=np.array([6], np.int32),
        output_ids=np.array([13], np.int32),
        tail_ids=np.array([1, 1, 1], np.int32),
        num_starts=1,
        token_ids=np.array([[[0, 1], [2, 3]]], np.int32),
        log_probs=log_probs[None],
        next_log_prob=np.array([[-0.125, -3.0]], np.float32),
        next_rank=np.array([[0, 5]], np.int32),
    )
    return DraftField([first, second], top_k=2, vocab_size=14, depth_limit=2, provenance=PROVENANCE)


def example_rows():
    """A timed row with samples, clocks and prompts, and a bare value."""
    before = {"sm_clock_mhz": 1980.0, "memory_clock_mhz": 2619.0, "gpu_temperature_c": 41.0}
    timed = bench_row(
        "round", "round_ms", "ms", provenance=PROVENANCE, case={"repeats": 1, "seed": 0}, samples=[2.0, 1.0, 4.0],
        sample_prompts=[0, 0, 1], method="ddtree", setting=32, budget=32, rows=33, context=100,
        note="2 prompts, fewer than 5", **state_columns(before, {**before, "gpu_temperature_c": 43.5}),
    )  # fmt: skip
    bare = bench_row("moe_int4", "bandwidth", "TB/s", provenance=PROVENANCE, case={}, value=3.5, simulated=True)
    return rows_frame([timed, bare])


if __name__ == "__main__":
    save_run(example_run(), FOLDER / "rounds-v1.parquet")
    save_field(example_field(), FOLDER / "field-v1.parquet")
    write_rows(example_rows(), FOLDER / "bench-rows-v1.parquet")
