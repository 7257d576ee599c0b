"""Training windows out of the token files: seeded by step, so that a resumed run draws what an unbroken one would."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kdlab.mini.corpus import KINDS
from kdlab.mini.token_files import read_tokens

# What share of the windows is of each kind: regular kinds are learnt fast, code and prose need the room.
MIX = {"code": 0.50, "math": 0.15, "structured": 0.20, "prose": 0.15}


@dataclass(frozen=True)
class TokenStream:
    """All documents of one kind, one after the other, [EOS] behind each."""

    tokens: Tensor  # [n] i16, on the training device
    starts: Tensor  # [documents] i64, first token of each document

    @classmethod
    def of(cls, tokens: np.ndarray, eos: int, device: torch.device | str) -> "TokenStream":
        """Move tokens [n] uint16 to `device` and find where documents start."""
        ends = np.flatnonzero(tokens[:-1] == eos) + 1
        starts = np.concatenate([[0], ends]).astype(np.int64)
        return cls(torch.from_numpy(tokens.astype(np.int16)).to(device), torch.from_numpy(starts).to(device))

    def windows(self, begin: Tensor, length: int) -> Tensor:
        """Return the windows [S, length] i64 that begin at `begin` [S]."""
        index = begin[:, None] + torch.arange(length, device=begin.device)
        return self.tokens[index.clamp_max(len(self.tokens) - 1)].long()

    def draw(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Return `count` random windows [count, length]: every second one begins with a document."""
        room = max(1, len(self.tokens) - length)
        device = self.tokens.device
        anywhere = torch.randint(room, (count,), generator=generator, device=device)
        document = torch.randint(len(self.starts), (count,), generator=generator, device=device)
        opening = self.starts[document].clamp_max(room - 1)
        return self.windows(torch.where(torch.arange(count, device=device) % 2 == 0, opening, anywhere), length)


def load_streams(folder: Path, part: str, eos: int, device: torch.device | str) -> dict[str, TokenStream]:
    """Load the text of every kind.

    Args:
        folder: of `kdlab.mini.token_files`.
        part: "train" or "held-out".
        eos: token id behind each document.
        device: where the tokens go.

    Raises:
        ArgumentError: a file is missing.
    """
    with ThreadPoolExecutor(len(KINDS)) as pool:
        found = list(pool.map(read_tokens, [folder / f"{kind}.{part}.u16.xz" for kind in KINDS]))
    return {kind: TokenStream.of(tokens, eos, device) for kind, tokens in zip(KINDS, found, strict=True)}


def counts_of(size: int, mix: dict[str, float]) -> dict[str, int]:
    """Split `size` windows over the kinds of `mix`, at least one each."""
    counts = {kind: max(1, round(size * share)) for kind, share in mix.items()}
    largest = max(counts, key=lambda kind: counts[kind])
    counts[largest] += size - sum(counts.values())
    return counts


def draw_batch(streams: dict[str, TokenStream], counts: dict[str, int], length: int, seed: int, step: int) -> Tensor:
    """Draw the windows of one step; they depend on seed and step alone.

    Args:
        streams: text by kind.
        counts: windows of each kind, S in all.
        length: tokens of a window.
        seed, step: of the draw.

    Returns:
        [S, length] i64, kind after kind.
    """
    device = next(iter(streams.values())).tokens.device
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + step)
    return torch.cat([streams[kind].draw(count, length, generator) for kind, count in counts.items()])


def fixed_windows(stream: TokenStream, count: int, length: int) -> Tensor:
    """Return windows spread evenly over a stream, to measure a loss on.

    Args:
        stream: the text.
        count: windows; fewer where the text is shorter.
        length: tokens of a window.

    Returns:
        [up to count, length] i64.
    """
    count = max(1, min(count, len(stream.tokens) // length))
    begin = torch.linspace(0, max(0, len(stream.tokens) - length), count).long()
    return stream.windows(begin.to(stream.tokens.device), length)
