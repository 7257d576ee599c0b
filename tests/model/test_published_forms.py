"""Our target beside transformers' own models, all reading the same files in the published form."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, DeepseekV3Config, DeepseekV3ForCausalLM

from kdlab.config_fields import read_json_object
from kdlab.model.synthetic import write_target
from kdlab.model.target import load_target
from tests.model.synthetics import WIDE
from tests.model.targets import logits_of

TOKENS = torch.arange(3, 51)[None]
EXPERTS = ".mlp.experts."


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    write_target(folder, changes=WIDE)
    return folder


def plain_experts(tensors):
    """Dequantise by numpy alone: a row is a stream of nibbles, the low one first, a scale every 32."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            stored = tensor.numpy().view(np.uint8)
            nibbles = np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), -1).astype(np.float32) - 8
            scale = tensors[name.removesuffix("_packed") + "_scale"].float().numpy()
            out[name.removesuffix("_packed")] = torch.from_numpy(nibbles * scale.repeat(32, axis=1))
        elif EXPERTS not in name:
            out[name] = tensor.float()
    return out


def fused(tensors, num_experts):
    """Stack the experts as transformers' modules hold them."""
    out = {name: tensor for name, tensor in tensors.items() if EXPERTS not in name}
    for stem in {name.split(EXPERTS)[0] for name in tensors if EXPERTS in name}:
        gate, up, down = (
            torch.stack([tensors[f"{stem}{EXPERTS}{e}.{kind}_proj.weight"] for e in range(num_experts)])
            for kind in ("gate", "up", "down")
        )
        out |= {f"{stem}.mlp.experts.gate_up_proj": torch.cat([gate, up], 1), f"{stem}.mlp.experts.down_proj": down}
    return out


def deepseek_v3(directory, **changes):
    """transformers' DeepseekV3ForCausalLM with the text decoder's tensors, experts dequantised."""
    text = read_json_object(directory / "config.json")["text_config"]
    text = {key: value for key, value in text.items() if key not in ("quantization_config", "model_type")}
    config = DeepseekV3Config(**(text | changes))
    config._attn_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).eval()
    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= {n.removeprefix("language_model."): t for n, t in load_file(path).items() if n.startswith("lang")}
    model.load_state_dict(fused(plain_experts(tensors), text["n_routed_experts"]), strict=True)
    return model


@torch.no_grad()
def test_deepseek_v3_gives_the_same_logits(directory):
    ours = logits_of(load_target(directory, device="cpu", dtype=torch.float32), TOKENS, [20, 28])
    theirs = deepseek_v3(directory)(TOKENS).logits
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    other = deepseek_v3(directory, routed_scaling_factor=2.0)(TOKENS).logits
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours, other, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_kimi_k25_reads_the_directory_itself_and_gives_the_same_logits(directory):
    """transformers dequantises with compressed-tensors, to bfloat16: so do we here, and keep float32 for the rest."""
    pytest.importorskip("transformers.models.kimi_k25", reason="transformers is older than Kimi K2.5's class")
    theirs, info = AutoModelForImageTextToText.from_pretrained(directory, dtype="float32", output_loading_info=True)
    lost = {*info["missing_keys"], *info["unexpected_keys"]}
    # It takes the vision tower for quantised, as its new names do not match `ignore`; the text needs none of it.
    assert all(name.startswith(("model.vision_tower.", "model.mm_projector.")) for name in lost)
    ours = load_target(directory, device="cpu", dtype=torch.float32)
    for name, part in ours.views().items():
        if EXPERTS in name:
            part.view.copy_(part.view.bfloat16())
    for parameter in theirs.parameters():  # `.float()` is refused for a quantised model
        parameter.data = parameter.data.float() if parameter.is_floating_point() else parameter.data
    expected = theirs.lm_head(theirs.eval().model.language_model(input_ids=TOKENS).last_hidden_state)
    got = logits_of(ours, TOKENS, [48])
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    part = ours.views()["model.layers.2.mlp.experts.1.up_proj.weight"]
    part.view.mul_(-1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(logits_of(ours, TOKENS, [48]), expected, atol=2e-4, rtol=1e-4)
