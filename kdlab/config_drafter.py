"""Constants of a DFlash drafter, read from its own `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.config_fields import MAX_LAYERS, Fields, load_config
from kdlab.config_rope import RopeConfig

_BLOCK_KEYS = ("block_size", "mask_token_id", "target_layer_ids")
# Options of other engines and trainers; kdlab runs the value that changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "causal_head": (False,),
    "draft_shift": (False,),
    "sample_from_anchor": (False,),
    "use_swa": (False,),
    "output_multiplier": (1, 1.0),
    "input_embedding_scale": (1, 1.0),
    "final_logit_softcapping": (0, 0.0),
}
MAX_BLOCK = 4096  # tables of this many positions are made before any weight is read
# DFlash2: slot i depends on the token chosen in slot i - 1, so its slots do not make a tree of independent rows.
_DFLASH2 = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Constants of a DFlash drafter; fields keep the names of `config.json`.

    `sliding[i]` is the attention window of layer i in tokens (None: all), `causal[i]` says whether a block row of
    layer i is kept from seeing later slots.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    num_target_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    sliding: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rope: RopeConfig

    @classmethod
    def load(cls, directory: str | Path) -> "DrafterConfig":
        """Read `directory`/config.json; see `from_dict`."""
        return load_config(directory, cls.from_dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DrafterConfig":
        """Read the object of a DFlash `config.json`.

        Raises:
            ConfigError: a key is missing, or has a value that kdlab does not run.
        """
        top = Fields(values, "config.json")
        inner = top.section("dflash_config") or Fields({}, f"{top.where}: dflash_config")
        _check_drafter(top, inner)
        heads, kv_heads = top.integer("num_attention_heads"), top.integer("num_key_value_heads")
        if heads % kv_heads:
            raise top.fail("num_key_value_heads", f"a divisor of {heads}", kv_heads)
        head_dim = top.integer("head_dim")
        block = _block_fields(top, inner)
        sliding, causal = _layer_masks(top, _causality(top, inner))
        config = cls(
            vocab_size=top.integer("vocab_size"),
            hidden_size=top.integer("hidden_size"),
            num_hidden_layers=top.integer("num_hidden_layers", maximum=MAX_LAYERS),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=top.integer("intermediate_size"),
            rms_norm_eps=top.number("rms_norm_eps"),
            max_position_embeddings=top.integer("max_position_embeddings"),
            num_target_layers=top.integer("num_target_layers"),
            block_size=block.integer("block_size", minimum=2, maximum=MAX_BLOCK),
            mask_token_id=block.integer("mask_token_id", minimum=0),
            target_layer_ids=block.integers("target_layer_ids"),
            sliding=sliding,
            causal=causal,
            rope=RopeConfig.from_dict(top.values, head_dim),
        )
        _check_block(block, config)
        return config

    @property
    def depth_limit(self) -> int:
        """Draft positions L of one round: the block without its anchor slot."""
        return self.block_size - 1


def _check_drafter(top: Fields, inner: Fields) -> None:
    architectures = top.get("architectures", ["DFlashDraftModel"])
    if architectures != ["DFlashDraftModel"]:
        raise top.fail("architectures", "['DFlashDraftModel']", architectures)
    top.choice("model_type", ("qwen3",), "qwen3")
    top.choice("hidden_act", ("silu",))
    top.choice("attention_bias", (False,), False)
    inner.only((*_BLOCK_KEYS, *_NEUTRAL, *_DFLASH2, "causal"))
    for section in (inner, top):
        for key, allowed in _NEUTRAL.items():
            section.choice(key, allowed, None)
        for key in _DFLASH2:
            if section.get(key, None) is not None:
                raise section.fail(key, "no key of DFlash2, which is not supported", section.values[key])


def _block_fields(top: Fields, inner: Fields) -> Fields:
    """Return block size, mask and taps: `dflash_config` first, the top level second, as DFlash looks them up."""
    for key in _BLOCK_KEYS:
        first, second = inner.values.get(key), top.values.get(key)
        if first is not None and second is not None and first != second:
            raise inner.fail(key, f"the top level's value {second!r}", first)
    found = {key: inner.get(key, top.values.get(key)) for key in _BLOCK_KEYS}
    return Fields({key: value for key, value in found.items() if value is not None}, inner.where)


def _check_block(block: Fields, config: DrafterConfig) -> None:
    bad = [tap for tap in config.target_layer_ids if not 0 <= tap < config.num_target_layers]
    if bad or not config.target_layer_ids:
        expected = f"layers of the target, 0 to {config.num_target_layers - 1}"
        raise block.fail("target_layer_ids", expected, list(config.target_layer_ids))
    if config.mask_token_id >= config.vocab_size:
        raise block.fail("mask_token_id", f"below vocab_size {config.vocab_size}", config.mask_token_id)


def _causality(top: Fields, inner: Fields) -> bool | None:
    first, second = top.flag("is_causal", None), inner.flag("causal", None)
    if first is not None and second is not None and first != second:
        raise inner.fail("causal", f"is_causal's value {first}", second)
    return second if first is None else first


def _layer_masks(top: Fields, causal: bool | None) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return window and causality of each layer; unless told, sliding layers are causal and full ones are not."""
    layers = top.integer("num_hidden_layers", maximum=MAX_LAYERS)
    uses_window = top.flag("use_sliding_window", None)
    if top.get("layer_types", None) is None and uses_window:
        raise top.fail("layer_types", "the type of each layer, as use_sliding_window is true", "nothing")
    kinds = top.get("layer_types", ["full_attention"] * layers)
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in map(str, kinds)):
        raise top.fail("layer_types", f"{layers} of 'full_attention' or 'sliding_attention'", kinds)
    if "sliding_attention" in kinds and uses_window is False:
        raise top.fail("use_sliding_window", "true, as layer_types holds 'sliding_attention'", False)
    window = top.integer("sliding_window") if "sliding_attention" in kinds else None
    slides = tuple(kind == "sliding_attention" for kind in kinds)
    return tuple(window if s else None for s in slides), tuple(s if causal is None else causal for s in slides)
