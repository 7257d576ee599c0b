"""Writes the trained models in the formats of their originals: Moonshot's INT4 shards, and DFlash's single file."""

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kdlab.errors import ArgumentError
from kdlab.mini.int4_training import packed
from kdlab.mini.shape import Shape, drafter_json, target_json
from kdlab.mini.tokenizer import special_ids
from kdlab.model.checkpoint import INDEX, SINGLE
from kdlab.model.drafter import Drafter
from kdlab.model.layers import Loadable
from kdlab.model.target import Target

_PREFIX = "language_model."
_BIAS = "e_score_correction_bias"
NUM_SHARDS = 3


def export_target(target: Target, shape: Shape, directory: Path) -> None:
    """Write config.json, generation_config.json, the shards and their index.

    Routed experts become INT4 `pack-quantized`, the correction bias stays float32, everything else becomes bf16.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = [_stored(target, layers) for layers in _layer_ranges(shape.num_layers)]
    shards[-1] |= {name: _plain(name, view) for name, view in _views(target).items() if ".layers." not in name}
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        named = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(named, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(named, file)
    size = sum(tensor.numel() * tensor.element_size() for tensors in shards for tensor in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(directory / "config.json", target_json(shape))
    ids = special_ids(shape.vocab_size)
    _write_json(directory / "generation_config.json", {"eos_token_id": [ids["<|im_end|>"], ids["[EOS]"]]})


def export_drafter(drafter: Drafter, shape: Shape, directory: Path) -> None:
    """Write config.json and model.safetensors in bf16, without embedding and head, which are the target's."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: view.detach().bfloat16().cpu().contiguous() for name, view in _views(drafter).items()}
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    _write_json(directory / "config.json", drafter_json(shape, drafter.config.block_size))


def _views(module: Loadable) -> dict[str, Tensor]:
    """Return the weights by name, each whole: one rank's parts alone make no checkpoint."""
    parts = module.views()
    cut = [name for name, part in parts.items() if not part.is_whole]
    if cut:
        raise ArgumentError("module", "whole tensors, so one rank's of one", f"a part of {cut[0]}")
    return {name: part.view for name, part in parts.items()}


def _layer_ranges(num_layers: int) -> list[range]:
    edges = [round(i * num_layers / NUM_SHARDS) for i in range(NUM_SHARDS + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(edges)]


def _stored(target: Target, layers: range) -> dict[str, Tensor]:
    """Return the tensors of some layers as they go to disk."""
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    found: dict[str, Tensor] = {}
    for name, view in _views(target).items():
        if not name.startswith(prefixes):
            continue
        if ".mlp.experts." in name:
            parts = packed(view.detach())
            found |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
        else:
            found[name] = _plain(name, view)
    return found


def _plain(name: str, view: Tensor) -> Tensor:
    return view.detach().to(torch.float32 if name.endswith(_BIAS) else torch.bfloat16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
