"""`python -m kdlab.mini.train`: trains the target, then the drafters, and writes them in their original formats.

    python -m kdlab.mini.train --stage target   --minutes 8.5 --tokens .mini/tokens --out .mini/kimi-k26-mini
    python -m kdlab.mini.train --stage drafters --minutes 7   --tokens .mini/tokens --out .mini/kimi-k26-mini

A run goes on from its state file. `--until` ends it at a time of day, `--steps` makes it repeatable, `--smoke` tiny.
"""

import argparse
import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any, TypeVar

import torch

from kdlab.errors import ArgumentError
from kdlab.mini.batches import TokenStream, load_streams
from kdlab.mini.clock import Clock
from kdlab.mini.draft_check import DraftCheck
from kdlab.mini.drafter_training import DrafterPlan, DrafterTrainer, new_drafter, write_text
from kdlab.mini.export import export_drafter, export_target
from kdlab.mini.shape import BLOCK_SIZES, MINI, SMOKE, Shape, drafter_config, target_config
from kdlab.mini.target_training import TargetPlan, TargetTrainer, measure, new_target
from kdlab.mini.tokenizer import special_ids
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.drafter import Drafter
from kdlab.model.target import Target
from kdlab.model.target_tensors import load_tensors

Plan = TypeVar("Plan", TargetPlan, DrafterPlan)

_SMOKE_TARGET = dict(windows=8, length=64, loop_streams=8, loop_length=48, loop_every=4, loop_batch=4, report_every=5)
_SMOKE_DRAFTERS = dict(
    sequences=4, length=64, anchors=4, streams=8, batches=1, longest_opening=24, check_streams=2, report_every=5,
    check_every=1000,
)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Run one stage as the command line asks."""
    torch.manual_seed(args.seed)
    if args.smoke:
        torch.set_num_threads(1)
    shape = SMOKE if args.smoke else MINI
    end = special_ids(shape.vocab_size)["[EOS]"]
    training = load_streams(args.tokens, "train", end, args.device)
    held_out = load_streams(args.tokens, "held-out", end, args.device)
    for kind, stream in training.items():
        say(f"{kind}: {len(stream.tokens) / 1e6:.2f} M tokens, held out {len(held_out[kind].tokens) / 1e6:.2f} M")
    stage = train_target if args.stage == "target" else train_drafters
    stage(args, shape, training, held_out)


def train_target(
    args: argparse.Namespace, shape: Shape, training: dict[str, TokenStream], held_out: dict[str, TokenStream]
) -> None:
    """Train, export, and measure the exported bytes."""
    plan = plan_of(TargetPlan(seed=args.seed, compiled=args.compile), _SMOKE_TARGET if args.smoke else {}, args.set)
    target = new_target(target_config(shape), args.seed, args.device)
    clock = Clock(minutes_left(args), args.steps)
    trainer = TargetTrainer(target, training, plan, clock, end=special_ids(shape.vocab_size)["[EOS]"])
    trainer.run(args.state / "target.pt", say)
    export_target(target, shape, args.out / "target")
    for file in (args.tokens / "tokenizer").iterdir():
        shutil.copy(file, args.out / "target" / file.name)
    stored = read_target(args.out / "target", shape, args.device)
    losses: dict[str, dict[str, float]] = {kind: {} for kind in training}
    for part, streams in (("training", training), ("held_out", held_out)):
        for kind, loss in measure(stored, streams, length=plan.length, count=64, quantized=False).items():
            losses[kind][f"loss_{part}"] = loss
    say(f"loss of the exported target, nats a token: {json.dumps(losses)}")
    facts = {"minutes": clock.elapsed_s / 60, "steps": trainer.step, "plan": dataclasses.asdict(plan), "loss": losses}
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def train_drafters(
    args: argparse.Namespace, shape: Shape, training: dict[str, TokenStream], held_out: dict[str, TokenStream]
) -> None:
    """Let the exported target write text, train both drafters on it, and export them."""
    plan = plan_of(DrafterPlan(seed=args.seed, compiled=args.compile), _SMOKE_DRAFTERS if args.smoke else {}, args.set)
    end = special_ids(shape.vocab_size)["[EOS]"]
    target = read_target(args.out / "target", shape, args.device)
    drafters = {
        f"drafter-b{size}": new_drafter(Drafter(drafter_config(shape, size), device=args.device), args.seed + size)
        for size in BLOCK_SIZES
    }
    written = write_text(target, training, plan, end=end, progress=say)
    sizes = dict(count=plan.check_streams, length=plan.length // 2, end=end)
    checks = [DraftCheck(target, drafters, held_out, **sizes, temperature=heat) for heat in (0.0, 1.0)]
    trainer = DrafterTrainer(target, drafters, written, plan, Clock(minutes_left(args), args.steps))
    trainer.run(args.state / "drafters.pt", say, lambda: "\n".join(check.line() for check in checks))
    for name, drafter in drafters.items():
        export_drafter(drafter, shape, args.out / name)


def read_target(directory: Path, shape: Shape, device: str) -> Target:
    """Load an exported target with dense float32 experts, whose forward pass is differentiable on any device."""
    target = Target(target_config(shape), dtype=torch.float32)
    with Checkpoint(directory) as checkpoint:
        load_tensors(target.views(), checkpoint, num_layers=shape.num_layers, int4=True)
    return target.to(device)


def plan_of(plan: Plan, smoke: dict[str, int], given: list[str]) -> Plan:
    """Return `plan` with the smoke settings and the NAME=VALUE pairs of the command line.

    Raises:
        ArgumentError: a name that the plan does not have.
    """
    values: dict[str, Any] = dict(smoke)
    known = {field.name for field in dataclasses.fields(plan)}
    for pair in given:
        name, _, text = pair.partition("=")
        if name not in known:
            raise ArgumentError("set", "one of " + ", ".join(sorted(known)), name)
        values[name] = type(getattr(plan, name))(float(text))
    return dataclasses.replace(plan, **values)


def minutes_left(args: argparse.Namespace) -> float:
    """Return the minutes of training: as given, or up to `--until`.

    Raises:
        ArgumentError: that time has passed.
    """
    if args.until is None:
        return args.minutes
    minutes = (args.until - time.time()) / 60
    if minutes <= 0:
        raise ArgumentError("until", f"a time after now, {time.time():.0f}", args.until)
    return minutes


def say(line: str) -> None:
    """Print one line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("target", "drafters"), required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="training time, compilation included")
    parser.add_argument("--until", type=float, help="in place of minutes: Unix time at which training ends")
    parser.add_argument("--steps", type=int, help="steps in place of minutes")
    parser.add_argument("--tokens", type=Path, default=Path(".mini/tokens"))
    parser.add_argument("--out", type=Path, default=Path(".mini/kimi-k26-mini"))
    parser.add_argument("--state", type=Path, default=Path(".mini/state"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the stage's plan")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape and few steps, on the CPU")
    args = parser.parse_args()
    if args.minutes <= 0 or (args.steps is not None and args.steps < 1):
        raise ArgumentError("minutes, steps", "above 0", (args.minutes, args.steps))
    run(args)


if __name__ == "__main__":
    main()
