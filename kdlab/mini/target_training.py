"""Trains the target from scratch: next-token loss on four kinds of text, INT4 in the loop, balanced experts."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdlab.config import TargetConfig
from kdlab.mini import repetition
from kdlab.mini.batches import MIX, TokenStream, counts_of, draw_batch, fixed_windows
from kdlab.mini.clock import Clock, learning_rate
from kdlab.mini.target_forward import TargetForward, block
from kdlab.mini.training_state import StateFile, make_optimizer
from kdlab.mini.writer import Writer, draw_openings
from kdlab.model.moe import MixtureOfExperts
from kdlab.model.target import DecoderLayer, Target

Progress = Callable[[str], None]
_LOOPING_KINDS = ("code", "prose")  # the kinds in which a repeated run of eight is a loop and not a format


@dataclass(frozen=True)
class TargetPlan:
    """The settings of a run; lengths in tokens, `windows` a step."""

    windows: int = 64
    length: int = 1024
    peak_rate: float = 3e-3
    decay: float = 0.1
    balance_rate: float = 1e-3
    loop_from: float = 0.8  # fraction of the run at which the loss against loops begins
    loop_weight: float = 0.5
    loop_streams: int = 1024
    loop_length: int = 192
    loop_every: int = 200  # steps between two times that the target writes
    loop_batch: int = 32
    report_every: int = 100
    seed: int = 0
    compiled: bool = True


def new_target(config: TargetConfig, seed: int, device: torch.device | str) -> Target:
    """Make a target with random weights, the projections back into the residual stream smaller than the others.

    Args:
        config: the shape.
        seed: of the weights.
        device: where they are made.

    Returns:
        The target in float32; every parameter but the routers' biases takes a gradient.
    """
    target = Target(config, dtype=torch.float32, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    shrink = (2 * config.num_hidden_layers) ** -0.5
    for name, part in target.views().items():
        view = part.view
        if name.endswith("bias"):
            view.zero_()
        elif view.dim() == 1:
            view.fill_(1.0)
        else:
            back = name.endswith(("o_proj.weight", "down_proj.weight"))
            spread = 0.05 if "embed" in name else 0.5 * view.shape[-1] ** -0.5 * (shrink if back else 1.0)
            view.normal_(0.0, spread, generator=generator)
    for name, parameter in target.named_parameters():
        parameter.requires_grad_(not name.endswith("router.bias"))
    return target


def forward_of(target: Target, *, quantized: bool, compiled: bool) -> TargetForward:
    """Return the training forward of `target`; a compiled layer serves all layers of its kind."""
    layer = torch.compile(block, dynamic=False) if compiled else block
    return TargetForward(target, quantized, layer)


def token_losses(target: Target, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Compute the loss of every next token.

    Args:
        target: owner of the head.
        hidden: [S, T, D] float, after the final norm.
        tokens: [S, T] i64.

    Returns:
        [S, T - 1] f32, nats.
    """
    logits = target.head(hidden[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


class TargetTrainer:
    """One run over `streams` until `clock` says that it is done."""

    def __init__(
        self, target: Target, streams: dict[str, TokenStream], plan: TargetPlan, clock: Clock, *, end: int
    ) -> None:
        self.target, self.streams, self.plan, self.clock, self.end = target, streams, plan, clock, end
        self.device = next(iter(streams.values())).tokens.device
        self.counts = counts_of(plan.windows, {kind: MIX[kind] for kind in streams})
        self.forward = forward_of(target, quantized=True, compiled=plan.compiled)
        self.losses = torch.compile(token_losses, dynamic=False) if plan.compiled else token_losses
        self.parameters = [p for p in target.parameters() if p.requires_grad]
        self.optimizer = make_optimizer([target], rate=plan.peak_rate, decay=plan.decay)
        self.autocast = functools.partial(torch.autocast, self.device.type, torch.bfloat16)
        self.step = 0
        self.loops: tuple[Tensor, Tensor, float] | None = None

    def run(self, state_path: Path, progress: Progress) -> None:
        """Train to the end; goes on from `state_path` if it exists."""
        state = StateFile(state_path, {"target": self.target}, self.optimizer)
        step, self.clock.spent_s = state.resume()
        seen_from, begun_s = step, self.clock.elapsed_s
        while (fraction := self.clock.fraction(step)) < 1:
            rate = learning_rate(fraction, step, self.plan.peak_rate)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            by_kind, loop_share = self._step(step, fraction)
            step += 1
            if step % self.plan.report_every == 0 or step == seen_from + 10:
                seconds = self.clock.elapsed_s - begun_s
                speed = (step - seen_from) * self.plan.windows * self.plan.length / seconds / 1e6
                kinds = " ".join(f"{kind} {loss:.3f}" for kind, loss in zip(self.counts, by_kind.tolist(), strict=True))
                progress(
                    f"target step {step} {fraction:.1%} {self.clock.elapsed_s:.0f} s {speed:.2f} M tok/s "
                    f"rate {rate:.2e} {kinds} looping {loop_share:.2f}"
                )
                state.save_if_due(step, self.clock.elapsed_s)
        state.save(step, self.clock.elapsed_s)
        self.step = step

    def _step(self, step: int, fraction: float) -> tuple[Tensor, float]:
        """Run one step; returns the loss by kind [kinds] and the share of greedy text that loops (0 at first)."""
        plan = self.plan
        tokens = draw_batch(self.streams, self.counts, plan.length, plan.seed, step)
        with self.autocast():
            out = self.forward(tokens)
            losses = self.losses(self.target, out.hidden, tokens)
        losses.mean().backward()
        share = 0.0
        if fraction >= plan.loop_from and plan.loop_weight > 0:
            share = self._against_loops(step)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        balance(self.target, out.loads, plan.balance_rate * min(1.0, 2 * (1 - fraction)))
        parts = losses.detach().mean(1).split(list(self.counts.values()))
        return torch.stack([part.mean() for part in parts]), share

    def _against_loops(self, step: int) -> float:
        plan = self.plan
        if self.loops is None or step % plan.loop_every == 0:
            self.loops = self._write(step)
        tokens, marked, share = self.loops
        generator = torch.Generator(self.device).manual_seed(plan.seed + step)
        chosen = torch.randint(len(tokens), (plan.loop_batch,), generator=generator, device=self.device)
        batch = tokens[chosen].long()
        with self.autocast():
            logits = self.target.head(self.forward(batch).hidden)
            loss = repetition.unlikelihood(logits, batch, marked[chosen])
        (plan.loop_weight * loss).backward()
        return share

    def _write(self, step: int) -> tuple[Tensor, Tensor, float]:
        """Let the target write greedily: tokens [S, T], which of them complete a repeated run, and their share."""
        plan = self.plan
        generator = torch.Generator(self.device).manual_seed(plan.seed + step)
        kinds = [kind for kind in self.streams if kind in _LOOPING_KINDS]
        each = plan.loop_streams // len(kinds)
        writer = Writer(self.target, quantized=True, dtype=torch.bfloat16)
        temperature = torch.zeros(each, device=self.device)
        tokens, marked = [], []
        for kind in kinds:
            openings = draw_openings(self.streams[kind], each, 16, 64, generator)
            written = writer.write(openings, temperature, plan.loop_length, end=self.end, generator=generator)
            tokens.append(written.tokens)
            marked.append(repetition.repeats(written.tokens, written.own))
        repeated = torch.cat(marked)
        return torch.cat(tokens), repeated, float(repeated.float().mean())


def balance(target: Target, loads: list[Tensor], rate: float) -> None:
    """Move the correction biases: up for experts with less than the mean load, down for the others.

    The loss-free balancing of DeepSeek-V3 (section 2.1.2): the bias takes part in the choice alone.

    Args:
        target: whose biases are moved, in place.
        loads: [E] f32 of every expert layer, rows that chose each expert.
        rate: size of the move.
    """
    layers = [cast(DecoderLayer, layer).mlp for layer in target.layers]
    routers = [mlp.router for mlp in layers if isinstance(mlp, MixtureOfExperts)]
    for router, load in zip(routers, loads, strict=True):
        router.bias.add_(rate * (load.mean() - load).sign())


@torch.no_grad()
def measure(
    target: Target, streams: dict[str, TokenStream], *, length: int, count: int, quantized: bool
) -> dict[str, float]:
    """Measure the mean loss of each kind, in nats a token.

    Args:
        target: in float32.
        streams: text by kind.
        length: tokens of a window.
        count: windows a kind, spread evenly over its text; fewer where it is shorter.
        quantized: read the experts as INT4 would hold them.
    """
    forward = forward_of(target, quantized=quantized, compiled=False)
    device = next(iter(streams.values())).tokens.device
    found = {}
    for kind, stream in streams.items():
        windows = fixed_windows(stream, count, length)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            sums = [token_losses(target, forward(part).hidden, part).mean() for part in windows.split(16)]
        found[kind] = float(torch.stack(sums).mean())
    return found
