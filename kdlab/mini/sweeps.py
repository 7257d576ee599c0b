"""`python -m kdlab.mini.sweeps`: what kimi-k26-mini's drafter of block size 8 accepts, arm by arm, as one small file.

It is the acceptance half of notebook 50: greedy text and text drawn at two temperatures, every prompt that ships.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch

from kdlab.decode import record
from kdlab.mini.corpus import KINDS
from kdlab.model.pair import load_pair
from kdlab.model.prompts import PromptSet, load_prompts
from kdlab.paths import DATA
from kdlab.study.sweep_file import save_sweeps, sweep_arms

BUDGETS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 23, 31, 47, 63)
TEMPERATURES = (0.0, 0.6, 1.0)
PATH = DATA / "recorded" / "mini-acceptance.parquet"


def record_sweeps(per_kind: int, max_new_tokens: int, *, device: str = "cpu") -> pd.DataFrame:
    """Record the bundled pair at every temperature and walk each recording with every arm.

    Args:
        per_kind: prompts of each kind, at most what the files hold.
        max_new_tokens: cap on each output.
        device: as in `load_pair`.
    """
    pair = load_pair("bundled", device=device)
    files = [list(load_prompts(DATA / "prompts" / f"{kind}.jsonl"))[:per_kind] for kind in KINDS]
    prompts = PromptSet.of("+".join(KINDS), [prompt for file in files for prompt in file])
    tables = []
    for temperature in TEMPERATURES:
        field = record(pair, prompts, top_k=max(BUDGETS) + 1, max_new_tokens=max_new_tokens, temperature=temperature)
        tables.append(sweep_arms(field, BUDGETS))
    return pd.concat(tables, ignore_index=True)


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument("--per-kind", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the pair is too small to share between cores
    table = record_sweeps(args.per_kind, args.max_new_tokens, device=args.device)
    save_sweeps(table, args.out)
    print(f"{args.out}: {len(table)} rows, {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
