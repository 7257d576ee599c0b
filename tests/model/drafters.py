"""The tiny drafter's config with changes, random drafters beside the published package's, and drafting with them."""

import json

import torch
from dflash.model import DFlashDraftModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from kdlab.config import DrafterConfig
from kdlab.model.drafter import Drafter
from kdlab.paths import DATA

TINY = DATA / "tiny-pair" / "drafter"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SLIDING = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}


def tiny_config(**changes):
    return json.loads((TINY / "config.json").read_text()) | changes


def random_pair(seed=0, **changes):
    """The published model with random weights, norms too, and ours with the same ones."""
    torch.manual_seed(seed)
    theirs = DFlashDraftModel(Qwen3Config(**tiny_config(**changes))).eval().requires_grad_(False)
    ours = Drafter(DrafterConfig.from_dict(tiny_config(**changes)))
    weights = theirs.state_dict()
    for name, weight in weights.items():
        weight.normal_(1 if name.endswith("norm.weight") else 0, 0.1)
        ours.views()[name].view.copy_(weight)
    assert set(ours.views()) == set(weights)
    return theirs, ours


def random_inputs(drafter, length, streams=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(streams, length, drafter.fc.shape[1], generator=generator)
    return taps, torch.randn(streams, drafter.config.block_size, drafter.config.hidden_size, generator=generator)


def at(*positions):
    return torch.tensor(positions)


def draft(drafter, taps, block, length=None):
    """Draft after `length` committed tokens, given in one call."""
    length = taps.shape[1] if length is None else length
    context = drafter.new_context(1, max(taps.shape[1], 1), "cpu", taps.dtype)
    drafter.extend(context, taps, at(0), at(length))
    return drafter(block, at(length), context)
