"""The tensors of a synthetic checkpoint: names, shapes and dtypes of the published form, and random values for them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kdlab.config import INT4_GROUP, DrafterConfig, TargetConfig
from kdlab.kernels.int4 import VALUES_PER_WORD
from kdlab.model.drafter import Drafter
from kdlab.model.target import Target
from kdlab.model.target_tensors import PREFIX

_PIECE = 1 << 18  # values made at a time, so that they stay in a cache
_NIBBLE_DEVIATION = 4.61  # of -8..7, each as likely
_Named = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to be written; `dtype` is safetensors' name for it, `values` what it holds if not random numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * (2 if self.dtype == "BF16" else 4)


@dataclass(frozen=True, slots=True)
class Vision:
    """Widths of the vision tower (MoonViT) and of the projector, which a text decoder skips."""

    hidden_size: int
    intermediate_size: int
    pos_emb_height: int
    pos_emb_width: int
    num_attention_heads: int
    num_hidden_layers: int = 27
    patch_size: int = 14
    merge: int = 2


def target_tensors(config: TargetConfig) -> list[list[Tensor]]:
    """Return a text decoder's tensors in groups: one a layer, then what belongs to none."""
    parts = Target(config, dtype=torch.bfloat16, device="meta", packed=config.experts_int4).views()
    groups: list[list[Tensor]] = [[] for _ in range(config.num_hidden_layers + 1)]
    for name, part in parts.items():
        group = groups[int(name.split(".")[2]) if name.startswith("model.layers.") else -1]
        if name.endswith(".weight_packed"):
            group.append(Tensor(PREFIX + name, "I32", part.shape))
            rows, words = part.shape
            shape_name = PREFIX + name.removesuffix("_packed") + "_shape"
            group.append(Tensor(shape_name, "I32", (2,), values=(rows, words * VALUES_PER_WORD)))
        else:
            group.append(Tensor(PREFIX + name, "F32" if name.endswith("_bias") else "BF16", part.shape))
    return groups


def drafter_tensors(config: DrafterConfig) -> list[Tensor]:
    """Return a drafter's tensors."""
    parts = Drafter(config, dtype=torch.bfloat16, device="meta").views()
    return [Tensor(name, "BF16", part.shape) for name, part in parts.items()]


def vision_tensors(vision: Vision, width: int) -> list[list[Tensor]]:
    """Return the projector to `width`, then the tower; the names are those of the published Kimi K2.5 and K2.6."""
    hidden, inner, merged = vision.hidden_size, vision.intermediate_size, vision.hidden_size * vision.merge**2
    patch = (hidden, 3, vision.patch_size, vision.patch_size)
    projector = _affine("pre_norm", hidden) + _affine("proj.0", merged, merged) + _affine("proj.2", width, merged)
    tower: list[_Named] = [("patch_embed.pos_emb.weight", (vision.pos_emb_height, vision.pos_emb_width, hidden))]
    tower += _affine("patch_embed.proj", *patch)
    for i in range(vision.num_hidden_layers):
        block = _affine("norm0", hidden) + _affine("norm1", hidden)
        block += _affine("wqkv", 3 * hidden, hidden) + _affine("wo", hidden, hidden)
        block += _affine("mlp.fc0", inner, hidden) + _affine("mlp.fc1", hidden, inner)
        tower += [(f"encoder.blocks.{i}.{name}", shape) for name, shape in block]
    tower += _affine("encoder.final_layernorm", hidden)
    both = {"mm_projector.": projector, "vision_tower.": tower}
    return [[Tensor(prefix + name, "BF16", shape) for name, shape in named] for prefix, named in both.items()]


def _affine(name: str, *shape: int) -> list[_Named]:
    return [(f"{name}.weight", shape), (f"{name}.bias", shape[:1])]


def random_values(tensor: Tensor, random: np.random.Generator) -> Iterator[NDArray[np.generic]]:
    """Yield a tensor's values in pieces, as they go to disk.

    Matrices are uniform with the deviation fan_in^-1/2, norms near 1, biases near 0. INT4 words are random bits, so
    every value -8..7 is there; scales give the experts the same deviation as the other matrices.
    """
    if tensor.values is not None:
        yield np.array(tensor.values, dtype=np.int32)
        return
    count = math.prod(tensor.shape)
    for begin in range(0, count, _PIECE):
        size = min(_PIECE, count - begin)
        if tensor.dtype == "I32":
            yield random.integers(0, 1 << 32, size, dtype=np.uint32)
            continue
        values = _floats(tensor, size, random)
        # The upper half of a float32 (little-endian) is a bfloat16.
        yield values if tensor.dtype == "F32" else values.view(np.uint16)[1::2]


def _floats(tensor: Tensor, size: int, random: np.random.Generator) -> NDArray[np.float32]:
    values = random.random(size, dtype=np.float32)
    if tensor.name.endswith(".weight_scale"):
        values += np.float32(0.5)
        return np.multiply(values, np.float32((tensor.shape[-1] * INT4_GROUP) ** -0.5 / _NIBBLE_DEVIATION), out=values)
    values -= np.float32(0.5)
    if tensor.name.endswith("embed_tokens.weight"):
        deviation, mean = 1.0, 0.0
    elif len(tensor.shape) > 1:
        deviation, mean = math.prod(tensor.shape[1:]) ** -0.5, 0.0
    else:
        deviation, mean = 0.1, float("norm" in tensor.name and tensor.name.endswith("weight"))
    values *= np.float32(deviation * 12**0.5)
    return np.add(values, np.float32(mean), out=values)
