"""`python -m kdlab.mini.evaluate`: the table that says how good kimi-k26-mini is, by kind of text.

One recording a block size and temperature gives the chain and every budget; expert ids come from a short live decode.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from kdlab.decode import generate, record
from kdlab.decode.field import DraftField
from kdlab.mini.corpus import KINDS
from kdlab.mini.shape import BLOCK_SIZES
from kdlab.model.pair import Pair, load_pair
from kdlab.model.prompts import Prompt, PromptSet, load_prompts
from kdlab.paths import DATA
from kdlab.study import repetition, summarize, sweep, sweep_chains

BUDGETS = (8, 16, 32, 64)


def acceptance_rows(field: DraftField) -> pd.DataFrame:
    """Return tokens per round by kind: columns kind, chain (the longest), best_chain, and tree_B a budget."""
    chains = summarize(sweep_chains(field), by=("kind", "setting"))
    trees = summarize(sweep(field, list(BUDGETS)), by=("kind", "setting"))
    rows = []
    for kind, of_kind in chains.groupby("kind", sort=False):
        longest = of_kind.loc[of_kind["setting"].idxmax(), "tokens_per_round"]
        row = {"kind": kind, "chain": longest, "best_chain": of_kind["tokens_per_round"].max()}
        of_trees = trees[trees["kind"] == kind].set_index("setting")["tokens_per_round"]
        rows.append(row | {f"tree_{budget}": of_trees.loc[float(budget)] for budget in BUDGETS})
    return pd.DataFrame(rows)


def expert_rows(pair: Pair, prompts: Sequence[Prompt], budget: int = BUDGETS[-1]) -> pd.DataFrame:
    """Return how many distinct experts a layer's first n rows touch on average, by kind, a column `experts_n` a size.

    Best-first rows are nested, so one decode at the largest budget tells of all.
    """
    run = generate(pair, PromptSet.of("experts", prompts), budget=budget, max_new_tokens=48, record_experts=True)
    rows = []
    for prompt, rounds in zip(run.prompts, run.rounds, strict=True):
        for done in rounds:
            ids = done.expert_ids
            if ids is None or ids.shape[1] <= budget:
                continue
            counts = {n: np.mean([len(np.unique(layer[:n])) for layer in ids]) for n in (1, *(b + 1 for b in BUDGETS))}
            rows.append({"kind": prompt.kind} | {f"experts_{n}": count for n, count in counts.items()})
    return pd.DataFrame(rows).groupby("kind", sort=False, as_index=False).mean()


def evaluate(model: Path, prompt_folder: Path, *, per_kind: int, max_new_tokens: int, device: str) -> pd.DataFrame:
    """Return one row a (block size, temperature, kind).

    Args:
        model: holds target/, drafter-b8/, drafter-b16/ and training.json.
        prompt_folder: holds KIND.jsonl.
        per_kind: prompts of each kind, at most what the files hold.
        max_new_tokens: cap on each output.
        device: as in `load_pair`.
    """
    prompts = [p for kind in KINDS for p in list(load_prompts(prompt_folder / f"{kind}.jsonl"))[:per_kind]]
    training = json.loads((model / "training.json").read_text(encoding="utf-8"))
    losses = pd.DataFrame([{"kind": kind, **training["loss"][kind]} for kind in KINDS])
    tables = []
    for size in BLOCK_SIZES:
        pair = load_pair(model / "target", model / f"drafter-b{size}", device=device)
        experts = expert_rows(pair, [p for kind in KINDS for p in [q for q in prompts if q.kind == kind][:4]])
        for temperature in (0.0, 1.0):
            field = record(
                pair, PromptSet.of("mini", prompts), top_k=64, max_new_tokens=max_new_tokens, temperature=temperature
            )
            table = acceptance_rows(field).merge(repetition(field)).merge(losses).merge(experts)
            tables.append(table.assign(block_size=size, temperature=temperature))
    found = pd.concat(tables, ignore_index=True)
    # Sampled text is not what loops: the greedy text of a kind says whether it does.
    greedy = found[found["temperature"] == 0.0].set_index(["block_size", "kind"])["loop"]
    loops = [bool(greedy.loc[(row.block_size, row.kind)]) for row in found.itertuples()]
    return found.assign(loop=loops).set_index(["block_size", "temperature", "kind"]).reset_index()


def headlines(table: pd.DataFrame) -> list[str]:
    """Return the sentences that the goals are about; kinds that loop are left out of them."""
    used = table[(table["temperature"] == 0.0) & ~table["loop"]]
    lines = [f"kinds that loop, left out: {sorted(set(table.loc[table['loop'], 'kind'])) or 'none'}"]
    for size, rows in used.groupby("block_size"):
        best = rows.loc[rows["chain"].idxmax()]
        gain = rows[f"tree_{BUDGETS[-1]}"].mean() / rows["best_chain"].mean()
        lines.append(
            f"block {size}, greedy: chain {rows['chain'].mean():.2f} tokens a round averaged over kinds, "
            f"{best['chain']:.2f} on {best['kind']}; tree of {BUDGETS[-1]} {rows[f'tree_{BUDGETS[-1]}'].mean():.2f}, "
            f"{gain:.2f} times the best chain"
        )
    return lines


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DATA / "kimi-k26-mini")
    parser.add_argument("--prompts", type=Path, default=DATA / "prompts")
    parser.add_argument("--per-kind", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; the pair is too small to share (1)")
    parser.add_argument("--csv", type=Path, help="write the table here as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = evaluate(
        args.model, args.prompts, per_kind=args.per_kind, max_new_tokens=args.max_new_tokens, device=args.device
    )
    print(table.to_string(index=False, float_format="{:.2f}".format))
    print("\n".join(headlines(table)))
    if args.csv is not None:
        table.to_csv(args.csv, index=False, float_format="%.4f")


if __name__ == "__main__":
    main()
