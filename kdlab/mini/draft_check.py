"""How well drafters predict what the target writes from held-out openings: a quick look during training."""

import torch
from torch import Tensor

from kdlab.mini.batches import TokenStream
from kdlab.mini.draft_forward import position_tables
from kdlab.mini.drafter_training import draft_logits, following
from kdlab.mini.target_training import forward_of
from kdlab.mini.writer import Writer, Written, draw_openings
from kdlab.model.drafter import Drafter
from kdlab.model.target import Target

_AT_ONCE = 16  # sequences


class DraftCheck:
    """Held-out text of every kind, written once by the target, and the drafters' chain acceptance on it."""

    def __init__(
        self, target: Target, drafters: dict[str, Drafter], streams: dict[str, TokenStream], *, count: int, length: int,
        end: int, temperature: float = 0.0,
    ) -> None:  # fmt: skip
        """Let `target` write `count` streams of `length` tokens a kind from held-out openings at `temperature`."""
        self.target, self.drafters, self.temperature = target, drafters, temperature
        device = next(iter(streams.values())).tokens.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        writer = Writer(target, quantized=False, dtype=dtype)
        generator = torch.Generator(device).manual_seed(1)
        self.written: dict[str, Written] = {}
        for kind, stream in streams.items():
            openings = draw_openings(stream, count, 64, 128, generator)
            heat = torch.full((count,), temperature, device=device)
            self.written[kind] = writer.write(openings, heat, length, end=end, generator=generator)

    @torch.no_grad()
    def line(self) -> str:
        """Return the mean tokens per round of each drafter's chain, by kind, every position taken as an anchor."""
        parts = []
        for name, drafter in self.drafters.items():
            found = {kind: self._chain(drafter, written) for kind, written in self.written.items()}
            kinds = " ".join(f"{kind} {value:.2f}" for kind, value in found.items())
            parts.append(f"{name}: {kinds} mean {sum(found.values()) / len(found):.2f}")
        return f"held out, temperature {self.temperature}, chain tokens per anchor; " + "; ".join(parts)

    def _chain(self, drafter: Drafter, written: Written) -> float:
        forward = forward_of(self.target, quantized=False, compiled=False)
        depth = drafter.config.block_size - 1
        accepted, weight = 0.0, 0.0
        for tokens, own in zip(written.tokens.long().split(_AT_ONCE), written.own.split(_AT_ONCE), strict=True):
            start = torch.arange(tokens.shape[1] - depth, device=tokens.device).expand(len(tokens), -1)
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
                taps = torch.cat(forward(tokens, drafter.config.target_layer_ids).taps, dim=-1)
                best = self._best(drafter, taps, tokens, start)
            wanted, inside = following(tokens, start, depth), following(own, start, depth)
            usable = inside[..., 0].float()
            lengths = ((best == wanted) & inside).long().cumprod(-1).sum(-1)
            accepted += float(((lengths + 1) * usable).sum())
            weight += float(usable.sum())
        return accepted / max(weight, 1.0)

    def _best(self, drafter: Drafter, taps: Tensor, tokens: Tensor, start: Tensor) -> Tensor:
        tables = position_tables(drafter, tokens.shape[1], tokens.device)
        pieces = [
            draft_logits(drafter, self.target, taps, tokens, piece, tables).argmax(-1)
            for piece in start.split(64, dim=1)
        ]
        return torch.cat(pieces, dim=1)
