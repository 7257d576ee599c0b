"""Trains DFlash drafters on text that the target wrote itself, greedy and sampled: many anchors a sequence at once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdlab.mini.batches import TokenStream
from kdlab.mini.clock import Clock, learning_rate
from kdlab.mini.draft_forward import draft_blocks, position_tables
from kdlab.mini.target_training import forward_of
from kdlab.mini.training_state import StateFile, make_optimizer
from kdlab.mini.writer import Openings, Writer, Written, draw_openings
from kdlab.model.drafter import Drafter
from kdlab.model.target import Target

Progress = Callable[[str], None]
# DFlash weighs slot k by exp(-(k - 1) / g), with g 4 for blocks of 8 and 7 for blocks of 16: an early miss costs more.
_DECAY = {8: 4.0, 16: 7.0}
_WRITTEN_MIX = {"code": 0.30, "math": 0.20, "structured": 0.24, "prose": 0.26}
_GREEDY_SHARE, _COOL_SHARE = 0.5, 0.2  # the rest is drawn at temperature 1
_COOL = 0.6


@dataclass(frozen=True)
class DrafterPlan:
    """The settings of a run; lengths in tokens."""

    sequences: int = 64  # a step
    length: int = 512
    anchors: int = 32  # a sequence
    peak_rate: float = 2e-3
    decay: float = 0.05
    streams: int = 4096  # written side by side
    batches: int = 20  # times that many streams are written
    shortest_opening: int = 16
    longest_opening: int = 128
    check_streams: int = 64  # a kind, held out
    report_every: int = 100
    check_every: int = 2000
    seed: int = 0
    compiled: bool = True


def new_drafter(drafter: Drafter, seed: int) -> Drafter:
    """Give every parameter of a new drafter a random value and a gradient; returns it."""
    generator = torch.Generator(drafter.fc.device).manual_seed(seed)
    shrink = (2 * drafter.config.num_hidden_layers) ** -0.5
    for name, part in drafter.views().items():
        view = part.view
        if view.dim() == 1:
            view.fill_(1.0)
        else:
            back = name.endswith(("o_proj.weight", "down_proj.weight"))
            view.normal_(0.0, 0.5 * view.shape[-1] ** -0.5 * (shrink if back else 1.0), generator=generator)
    return drafter.requires_grad_()


def write_text(
    target: Target, streams: dict[str, TokenStream], plan: DrafterPlan, *, end: int, progress: Progress
) -> Written:
    """Let the target write `plan.batches` times `plan.streams` streams that begin like training documents.

    Args:
        target: with dense experts whose values are those of the stored INT4.
        streams: training text by kind, for the openings.
        plan: how much, and from openings of which lengths.
        end: token id behind which a stream goes on with another opening.
        progress: called with a line after each batch.

    Returns:
        All streams; half of them greedy, a fifth drawn at temperature 0.6, the others at 1.
    """
    device = next(iter(streams.values())).tokens.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    writer = Writer(target, quantized=False, dtype=dtype)
    parts = []
    for batch in range(plan.batches):
        generator = torch.Generator(device).manual_seed(plan.seed * 1_000_003 + batch)
        openings = mixed_openings(streams, plan, generator)
        temperature = _temperatures(plan.streams, device, generator)
        parts.append(writer.write(openings, temperature, plan.length, end=end, generator=generator))
        progress(f"written {batch + 1} of {plan.batches} batches of {plan.streams} x {plan.length} tokens")
    return Written(torch.cat([part.tokens for part in parts]), torch.cat([part.own for part in parts]))


def mixed_openings(streams: dict[str, TokenStream], plan: DrafterPlan, generator: torch.Generator) -> Openings:
    """Return four openings a stream, of all kinds, shuffled."""
    parts = [
        draw_openings(
            stream, max(1, int(4 * plan.streams * _WRITTEN_MIX[kind])), plan.shortest_opening, plan.longest_opening,
            generator,
        )
        for kind, stream in streams.items()
    ]  # fmt: skip
    tokens, lengths = torch.cat([p.tokens for p in parts]), torch.cat([p.lengths for p in parts])
    order = torch.randperm(len(lengths), generator=generator, device=lengths.device)
    return Openings(tokens[order], lengths[order])


def _temperatures(count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    share = torch.rand(count, generator=generator, device=device)
    warm = torch.where(share < _GREEDY_SHARE + _COOL_SHARE, _COOL, 1.0)
    return torch.where(share < _GREEDY_SHARE, 0.0, warm)


def draft_logits(
    drafter: Drafter, target: Target, taps: Tensor, tokens: Tensor, start: Tensor, tables: tuple[Tensor, Tensor]
) -> Tensor:
    """Draft A blocks of each sequence.

    Args:
        drafter: in float32.
        target: owner of embedding and head.
        taps: [S, T, taps * D] float, the target's hidden states.
        tokens: [S, T] int.
        start: [S, A] i64, the anchors' positions in `tokens`.
        tables: of `position_tables`.

    Returns:
        [S, A, b - 1, V] logits of all mask slots.
    """
    width = drafter.config.block_size
    ids = torch.full((*start.shape, width), drafter.config.mask_token_id, device=start.device)
    ids[..., 0] = tokens.gather(1, start)
    hidden = draft_blocks(drafter, taps, F.embedding(ids, target.embedding), start, tables)
    return target.head(hidden[:, :, 1:])


def following(values: Tensor, start: Tensor, count: int) -> Tensor:
    """Gather what stands behind each anchor.

    Args:
        values: [S, T], any dtype.
        start: [S, A] i64, the anchors' positions.
        count: positions behind each.

    Returns:
        [S, A, count], the dtype of `values`.
    """
    index = start[..., None] + 1 + torch.arange(count, device=start.device)
    return values.gather(1, index.flatten(1)).view(*start.shape, count)


def draft_loss(
    drafter: Drafter, target: Target, taps: Tensor, tokens: Tensor, own: Tensor, start: Tensor,
    tables: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """Return the mean loss of the slots whose tokens, and all before them in the block, the target wrote.

    Slots weigh exp(-slot / g), as published for DFlash: what fails early costs the whole rest of the block.

    Args:
        drafter, target, taps, tokens, start, tables: as for `draft_logits`.
        own: [S, T] bool, the target wrote this token.

    Returns:
        [] f32, nats.
    """
    count = drafter.config.block_size - 1
    logits = draft_logits(drafter, target, taps, tokens, start, tables)
    wanted = following(tokens, start, count)
    valid = following(own, start, count).long().cumprod(-1)
    slots = torch.arange(count, device=start.device)
    weight = valid * torch.exp(-slots / _DECAY.get(drafter.config.block_size, 4.0))
    losses = F.cross_entropy(logits.flatten(0, 2).float(), wanted.flatten(), reduction="none")
    return (losses * weight.flatten()).sum() / weight.sum().clamp_min(1)


class DrafterTrainer:
    """Trains several drafters on the same batches, so that the target's hidden states are computed once."""

    def __init__(
        self, target: Target, drafters: dict[str, Drafter], written: Written, plan: DrafterPlan, clock: Clock
    ) -> None:
        self.target, self.drafters, self.written, self.plan, self.clock = target, drafters, written, plan, clock
        self.device = written.tokens.device
        length = written.tokens.shape[1]
        self.tables = {name: position_tables(d, length, self.device) for name, d in drafters.items()}
        self.taps = next(iter(drafters.values())).config.target_layer_ids
        self.forward = forward_of(target, quantized=False, compiled=plan.compiled)
        self.loss = torch.compile(draft_loss, dynamic=False) if plan.compiled else draft_loss
        self.optimizer = make_optimizer(drafters.values(), rate=plan.peak_rate, decay=plan.decay)
        self.autocast = functools.partial(torch.autocast, self.device.type, torch.bfloat16)
        self.deepest = max(drafter.config.block_size for drafter in drafters.values()) - 1

    def run(self, state_path: Path, progress: Progress, check: Callable[[], str]) -> None:
        """Train to the end; `check` says how good the drafters are on held-out text."""
        state = StateFile(state_path, dict(self.drafters), self.optimizer)
        step, self.clock.spent_s = state.resume()
        while (fraction := self.clock.fraction(step)) < 1:
            rate = learning_rate(fraction, step, self.plan.peak_rate)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            losses = self._step(step)
            step += 1
            if step % self.plan.report_every == 0:
                found = " ".join(f"{name} {float(loss):.3f}" for name, loss in losses.items())
                progress(f"drafters step {step} {fraction:.1%} {self.clock.elapsed_s:.0f} s rate {rate:.2e} {found}")
                state.save_if_due(step, self.clock.elapsed_s)
            if step % self.plan.check_every == 0:
                progress(check())
        state.save(step, self.clock.elapsed_s)
        progress(check())

    def _step(self, step: int) -> dict[str, Tensor]:
        plan = self.plan
        generator = torch.Generator(self.device).manual_seed(plan.seed * 1_000_003 + step)
        chosen = torch.randint(len(self.written.tokens), (plan.sequences,), generator=generator, device=self.device)
        tokens, own = self.written.tokens[chosen].long(), self.written.own[chosen]
        start = anchors(own, plan.anchors, self.deepest, generator)
        losses = {}
        with self.autocast():
            with torch.no_grad():
                taps = torch.cat(self.forward(tokens, self.taps).taps, dim=-1)
            for name, drafter in self.drafters.items():
                losses[name] = self.loss(drafter, self.target, taps, tokens, own, start, self.tables[name])
        torch.stack(list(losses.values())).sum().backward()
        for drafter in self.drafters.values():
            nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {name: loss.detach() for name, loss in losses.items()}


def anchors(own: Tensor, count: int, depth: int, generator: torch.Generator) -> Tensor:
    """Draw positions whose next token the target wrote.

    Args:
        own: [S, T] bool, the target wrote this token.
        count: positions a sequence.
        depth: positions behind an anchor that must lie inside the sequence.
        generator: of the draw, on the device of `own`.

    Returns:
        [S, count] i64, distinct in a sequence.
    """
    usable = own[:, 1 : own.shape[1] - depth + 1].float()
    # A sequence without any is left with weightless anchors rather than with an error of multinomial.
    return torch.multinomial(usable + 1e-6, count, generator=generator)
