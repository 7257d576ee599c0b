"""Fills a target's weights from a checkpoint: names, rules for what is skipped, and INT4 experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kdlab.config import INT4_GROUP
from kdlab.errors import CheckpointError
from kdlab.kernels.int4 import VALUES_PER_WORD, dequantize_int4
from kdlab.model.checkpoint import Checkpoint, check_names, read_into
from kdlab.model.layers import Part

_PREFIX = "language_model."
_VISION = ("vision_tower.", "mm_projector.")
_BIAS = "e_score_correction_bias"
# A layer past the last one that lacks it is no multi-token prediction: the config says too few layers.
_MTP = "eh_proj.weight"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Tensors of the checkpoint that a text decoder does not use, by rule."""

    vision: int = 0  # vision tower and projector
    mtp: int = 0  # layers from num_hidden_layers on: multi-token prediction


def load_tensors(parts: dict[str, Part], checkpoint: Checkpoint, *, num_layers: int, int4: bool) -> Skipped:
    """Fill every part.

    Args:
        parts: name -> part of a tensor, as `Target.views` gives them.
        checkpoint: where the tensors are.
        num_layers: decoder layers; later ones are skipped where they predict further tokens (MTP).
        int4: the routed experts lie on disk as INT4 words, scales and shapes.

    Raises:
        CheckpointError: tensors are missing, unknown, there twice, or of a wrong shape or dtype.
    """
    stored, skipped = _stored_names(checkpoint, num_layers)
    sources = {name: _sources(name, int4) for name in parts}
    check_names({source for group in sources.values() for source in group}, stored, checkpoint.directory)
    for name, part in parts.items():
        tensors = [checkpoint.read(stored[source]) for source in sources[name]]
        if len(tensors) == 1:
            _check_exact(name, part.view, tensors[0])
            read_into(part, tensors[0], name)
        elif name.endswith(".weight_packed"):
            _check_weight_shape(sources[name][1], [part.shape[0], part.shape[1] * VALUES_PER_WORD], tensors[1])
            read_into(part, tensors[0], name)
        else:
            _dequantize_into(part, tensors, sources[name])
    return skipped


def _stored_names(checkpoint: Checkpoint, num_layers: int) -> tuple[dict[str, str], Skipped]:
    """Return the names without `language_model.` -> the names on disk, less what is skipped."""
    stored: dict[str, str] = {}
    vision = mtp = 0
    plain_names = {name.removeprefix(_PREFIX) for name in checkpoint.names}
    for name in checkpoint.names:
        plain = name.removeprefix(_PREFIX)
        if name.startswith(_VISION):
            vision += 1
        elif _layer(plain) >= num_layers and f"model.layers.{_layer(plain)}.{_MTP}" in plain_names:
            mtp += 1
        elif plain in stored:
            raise CheckpointError(f"{checkpoint.directory}: expected one of {name} and {stored[plain]}, got both")
        else:
            stored[plain] = name
    return stored, Skipped(vision, mtp)


def _layer(name: str) -> int:
    """Return the layer number in `model.layers.N.…`, -1 for other names."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 3 and parts[2].isdecimal() else -1


def _sources(name: str, int4: bool) -> list[str]:
    """Return the stored tensors that one weight is read from."""
    if not int4 or ".mlp.experts." not in name or name.endswith(".weight_scale"):
        return [name]
    stem = name.removesuffix("_packed")
    if name.endswith(".weight_packed"):
        return [name, stem + "_shape"]
    return [stem + "_packed", stem + "_scale", stem + "_shape"]


def _check_exact(name: str, view: Tensor, tensor: Tensor) -> None:
    """Refuse a stored dtype that has already lost what the weight needs, or would lose it on the way in."""
    if name.endswith(_BIAS) and tensor.dtype not in (torch.float32, torch.float64):
        raise CheckpointError(f"{name}: expected dtype torch.float32, as it decides the choice, got {tensor.dtype}")
    if name.endswith(".weight_scale") and tensor.dtype != view.dtype:
        raise CheckpointError(f"{name}: expected dtype {view.dtype}, got {tensor.dtype}")


def _check_weight_shape(name: str, expected: list[int], tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.tolist() != expected:
        raise CheckpointError(f"{name}: expected the integers {expected}, got {tensor.tolist()} {tensor.dtype}")


def _dequantize_into(part: Part, tensors: list[Tensor], names: list[str]) -> None:
    packed, scale, shape = tensors
    rows, columns = part.shape
    _check_weight_shape(names[2], [rows, columns], shape)
    if packed.dtype != torch.int32 or list(packed.shape) != [rows, columns // VALUES_PER_WORD]:
        expected = f"torch.int32 [{rows}, {columns // VALUES_PER_WORD}]"
        raise CheckpointError(f"{names[0]}: expected {expected}, got {packed.dtype} {list(packed.shape)}")
    if not scale.is_floating_point() or list(scale.shape) != [rows, columns // INT4_GROUP]:
        expected = f"a float [{rows}, {columns // INT4_GROUP}]"
        raise CheckpointError(f"{names[1]}: expected {expected}, got {scale.dtype} {list(scale.shape)}")
    read_into(part, dequantize_int4(packed, scale, part.view.dtype), names[0])
