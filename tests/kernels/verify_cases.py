"""Inputs of verify_attention: random trees, scattered pages, NaN wherever nobody may look."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kdlab.kernels import reference
from kdlab.kernels.ancestors import ancestor_words, num_words, unpack_ancestors

LATENT, ROPE, PAGE = 512, 64, 64
WIDTH = LATENT + ROPE
SCALE = 0.14467963


@dataclass(frozen=True)
class Case:
    """Arguments of one call; `tensors` in the order of the op."""

    q: Tensor
    pages: Tensor
    block_table: Tensor
    prefix_len: Tensor
    ancestors: Tensor
    num_nodes: Tensor
    latent: int = LATENT

    @property
    def tensors(self):
        return self.q, self.pages, self.block_table, self.prefix_len, self.ancestors, self.num_nodes

    def place(self, stream, key):
        """Where key `key` of a stream stands: page and row."""
        return int(self.block_table[stream, key // PAGE]), key % PAGE

    def mask(self):
        used = torch.arange(self.q.shape[1], device=self.q.device) < self.num_nodes[:, None]
        return unpack_ancestors(self.ancestors) & used[:, :, None] & used[:, None]

    def alone(self, stream):
        """The call with this stream only."""
        one = slice(stream, stream + 1)
        rest = [tensor[one].contiguous() for tensor in self.tensors[2:]]
        return Case(self.q[one].contiguous(), self.pages, *rest, latent=self.latent)

    def expected(self, dtype=torch.float64):
        """o and lse of the reference on these inputs in `dtype`, of unused rows 0 and -inf; exact in float64."""
        used = torch.arange(self.q.shape[1], device=self.q.device) < self.num_nodes[:, None]
        q = self.q.masked_fill(~used[..., None, None], 0).to(dtype)
        inputs = (q, self.pages.to(dtype), self.block_table, self.prefix_len, self.mask(), SCALE, self.latent)
        o, lse = reference.verify_attention(*inputs)
        return o.masked_fill(~used[..., None, None], 0), lse.masked_fill(~used[..., None], -torch.inf)


def random_parents(num_rows, rng):
    """Parents before children; every third row hangs on a row far ahead of it, so that siblings stand far apart."""
    parents = [-1]
    for row in range(1, num_rows):
        parents.append(int(rng.integers(0, min(row, 3))) if row % 3 == 0 else int(rng.integers(0, row)))
    return parents


def chain_parents(num_rows, rng=None):
    return [row - 1 for row in range(num_rows)]


def bitsets(parents, num_rows):
    """Ancestor words [num_rows, W] of a tree that uses the first rows; the words of the others have all bits set."""
    words = np.full((num_rows, num_words(num_rows)), 0xFFFFFFFF, dtype=np.uint32)
    if parents:
        words[: len(parents)] = ancestor_words(parents, words.shape[1])
    return words


def make_case(
    prefixes, nodes, heads, *, rows=None, dtype=torch.bfloat16, device="cuda", seed=0, parents=random_parents,
    latent=LATENT, rope=ROPE, spare_pages=2,
):  # fmt: skip
    """One call with these prefixes and tree sizes, one of each a stream.

    Cache rows that no one sees, spare pages and unused query rows hold NaN; the pages of all streams are shuffled.
    """
    rows = rows or max(1, *nodes)
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)
    lengths = [prefix + count for prefix, count in zip(prefixes, nodes, strict=True)]
    width = max(-(-length // PAGE) for length in lengths) + spare_pages
    order = torch.randperm(len(prefixes) * width, generator=generator, device=device)
    table = order.view(len(prefixes), width).int()
    pages = torch.full((len(prefixes) * width, PAGE, latent + rope), torch.nan, dtype=dtype, device=device)
    q = torch.randn(len(prefixes), rows, heads, latent + rope, generator=generator, device=device).to(dtype)
    flat = pages.view(-1, latent + rope)
    for stream, (length, count) in enumerate(zip(lengths, nodes, strict=True)):
        key = torch.arange(length, device=device)
        values = torch.randn(length, latent + rope, generator=generator, device=device).to(dtype)
        flat[table[stream, key // PAGE].long() * PAGE + key % PAGE] = values
        q[stream, count:] = torch.nan
    words = np.stack([bitsets(parents(count, rng) if count else [], rows) for count in nodes])
    ancestors = torch.from_numpy(words.view(np.int32)).to(device).view(torch.uint32)
    counts = torch.tensor(nodes, dtype=torch.int32, device=device)
    prefix_len = torch.tensor(prefixes, dtype=torch.int32, device=device)
    return Case(q, pages, table, prefix_len, ancestors, counts, latent)


def with_bit(case, stream, row, seen, value=True):
    """The case with one ancestor bit set or cleared."""
    words = case.ancestors.view(torch.int32).clone()
    bit = 1 << (seen % 32)
    old = int(words[stream, row, seen // 32]) & 0xFFFFFFFF
    new = old | bit if value else old & ~bit
    words[stream, row, seen // 32] = new - (new >> 31 << 32)
    return replace(case, ancestors=words.view(torch.uint32))


def with_key(case, stream, key, value):
    """The case with every value of one cache row replaced."""
    pages = case.pages.clone()
    pages[case.place(stream, key)] = value
    return replace(case, pages=pages)
