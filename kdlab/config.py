"""Constants of target and drafter, read from Hugging Face `config.json`: none of them stands in the code.

The one module that reads environment variables, too: see `cache_folder`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kdlab.checks import check_float
from kdlab.config_drafter import DrafterConfig
from kdlab.config_fields import MAX_LAYERS, Fields, load_config
from kdlab.config_rope import RopeConfig
from kdlab.errors import ArgumentError

__all__ = ["DrafterConfig", "RopeConfig", "TargetConfig", "cache_folder"]

# compressed-tensors' name for what Kimi K2.6 ships; kdlab reads no other quantised format.
INT4_GROUP = 32


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Constants of a DeepseekV3 target as Kimi K2.6 uses it; fields keep the names of `config.json`.

    Widths are in values. `q_lora_rank` None means one full q_proj. `experts_int4` says that the routed experts are
    stored as INT4 `pack-quantized`. `latent_norm_eps` is the epsilon of the q_a and kv_a norms, which no config states.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    moe_layer_freq: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    latent_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_interleave: bool
    rope: RopeConfig
    experts_int4: bool

    @classmethod
    def load(cls, directory: str | Path, *, latent_norm_eps: float = 1e-6) -> "TargetConfig":
        """Read `directory`/config.json; see `from_dict`."""
        return load_config(directory, partial(cls.from_dict, latent_norm_eps=latent_norm_eps))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, latent_norm_eps: float = 1e-6) -> "TargetConfig":
        """Read the object of a `config.json`, flat or nested in `text_config`.

        Args:
            values: the JSON object.
            latent_norm_eps: epsilon of the q_a and kv_a norms: 1e-6 in Moonshot's code and transformers, 1e-5 in
                SGLang and vLLM.

        Raises:
            ConfigError: a key is missing, or has a value that kdlab does not run.
            ArgumentError: `latent_norm_eps` is not a finite number above 0.
        """
        check_float("latent_norm_eps", latent_norm_eps, above=0.0)
        top = Fields(values, "config.json")
        text = top.section("text_config") or top
        _check_architecture(text)
        heads = text.integer("num_attention_heads")
        text.choice("num_key_value_heads", (heads,), heads)
        rope_dim = text.integer("qk_rope_head_dim")
        config = cls(
            vocab_size=text.integer("vocab_size"),
            hidden_size=text.integer("hidden_size"),
            num_hidden_layers=text.integer("num_hidden_layers", maximum=MAX_LAYERS),
            num_attention_heads=heads,
            q_lora_rank=text.integer("q_lora_rank", None),
            kv_lora_rank=text.integer("kv_lora_rank"),
            qk_nope_head_dim=text.integer("qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=text.integer("v_head_dim"),
            intermediate_size=text.integer("intermediate_size"),
            moe_intermediate_size=text.integer("moe_intermediate_size"),
            n_routed_experts=text.integer("n_routed_experts"),
            n_shared_experts=text.integer("n_shared_experts", 0, minimum=0),
            num_experts_per_tok=text.integer("num_experts_per_tok"),
            first_k_dense_replace=text.integer("first_k_dense_replace", minimum=0),
            moe_layer_freq=text.integer("moe_layer_freq", 1),
            n_group=text.integer("n_group"),
            topk_group=text.integer("topk_group"),
            norm_topk_prob=text.flag("norm_topk_prob"),
            routed_scaling_factor=text.number("routed_scaling_factor"),
            rms_norm_eps=text.number("rms_norm_eps"),
            latent_norm_eps=latent_norm_eps,
            max_position_embeddings=text.integer("max_position_embeddings"),
            tie_word_embeddings=text.flag("tie_word_embeddings", False),
            rope_interleave=text.flag("rope_interleave", True),
            rope=RopeConfig.from_dict(text.values, rope_dim),
            experts_int4=_experts_int4(top, text),
        )
        _check_experts(text, config)
        return config

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention scores: (nope + rope width)^-1/2 times the square of YaRN's mscale."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.score_factor

    @property
    def cache_width(self) -> int:
        """Values in one latent cache row: latent width C plus rope width R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Say whether 0-based `layer` holds routed experts (else it is dense)."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def _check_architecture(text: Fields) -> None:
    text.choice("model_type", ("deepseek_v3", "kimi_k2"), "deepseek_v3")
    text.choice("hidden_act", ("silu",))
    text.choice("attention_bias", (False,), False)
    text.choice("scoring_func", ("sigmoid",), "sigmoid")
    text.choice("topk_method", ("noaux_tc",), "noaux_tc")


def _check_experts(text: Fields, config: TargetConfig) -> None:
    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise text.fail("n_group", f"a divisor of {experts} that leaves two experts a group", groups)
    if config.topk_group > groups:
        raise text.fail("topk_group", f"at most n_group {groups}", config.topk_group)
    reachable = experts // groups * config.topk_group
    if config.num_experts_per_tok > reachable:
        raise text.fail("num_experts_per_tok", f"at most the {reachable} of topk_group", config.num_experts_per_tok)
    for key, width in (("hidden_size", config.hidden_size), ("moe_intermediate_size", config.moe_intermediate_size)):
        if config.experts_int4 and width % INT4_GROUP:
            raise text.fail(key, f"a multiple of the {INT4_GROUP} values of an INT4 group", width)


def _experts_int4(top: Fields, text: Fields) -> bool:
    """Check `quantization_config` for INT4 `pack-quantized`, group 32, symmetric; False where there is none."""
    found = text.section("quantization_config") or top.section("quantization_config")
    if found is None:
        return False
    found.choice("quant_method", ("compressed-tensors",))
    found.choice("format", ("pack-quantized",))
    found.choice("kv_cache_scheme", (), None)
    for key in ("sparsity_config", "transform_config"):  # compressed-tensors writes {} for none
        found.choice(key, ({},), None)
    groups = found.section("config_groups") or Fields({}, f"{found.where}: config_groups")
    if len(groups.values) != 1:
        raise found.fail("config_groups", "one group", list(groups.values))
    group = groups.section(next(iter(groups.values)))
    weights = None if group is None else group.section("weights")
    if group is None or weights is None:
        raise groups.fail("weights", "an object", None)
    group.choice("input_activations", (), None)
    group.choice("output_activations", (), None)
    expected = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4_GROUP}
    for key, value in expected.items():
        weights.choice(key, (value,))
    weights.choice("dynamic", (False,), False)
    weights.choice("actorder", (), None)
    return True


def cache_folder() -> Path:
    """Return the folder for what can be made again: $KDLAB_CACHE, else kdlab/ in $XDG_CACHE_HOME or in ~/.cache.

    Raises:
        ArgumentError: no variable is set and the user has no home.
    """
    own, shared = os.environ.get("KDLAB_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().absolute()
    if shared:
        return Path(shared).absolute() / "kdlab"
    try:
        return Path.home() / ".cache" / "kdlab"
    except RuntimeError as error:
        raise ArgumentError("KDLAB_CACHE", "a folder in this environment variable (there is no home)", None) from error


def racecheck_builds() -> bool:
    """Return whether kernels are compiled so that racecheck can follow all of their barriers: $KDLAB_RACECHECK is 1.

    Such kernels are slower and otherwise the same (docs/racecheck.md). It is looked at when a kernel is first called.

    Raises:
        ArgumentError: the variable is neither 0 nor 1.
    """
    wanted = os.environ.get("KDLAB_RACECHECK", "0")
    if wanted not in ("0", "1"):
        raise ArgumentError("KDLAB_RACECHECK", "0 or 1 in this environment variable", repr(wanted))
    return wanted == "1"


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as $CUDA_VISIBLE_DEVICES names them; without it, all by number."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip() not in ("", "-1", "NoDevFiles")]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]
