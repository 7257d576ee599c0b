"""Rotary position embedding as a `config.json` states it: plain, or YaRN."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdlab.config_fields import Fields

_YARN_KINDS = ("yarn", "deepseek_yarn")
_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "partial_rotary_factor",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Constants of one rotary embedding.

    `dim` is the rope width R, `theta` the base. A `factor` of 1 or more stretches the positions as YaRN does; None is
    plain rope, and then the five YaRN constants have no effect. `amplitude` multiplies cos and sin.
    """

    dim: int
    theta: float
    factor: float | None = None
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    amplitude: float = 1.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], dim: int) -> "RopeConfig":
        """Read `rope_parameters`, or `rope_theta` beside `rope_scaling`.

        Args:
            values: the object that holds these keys.
            dim: rope width R, even.

        Raises:
            ConfigError: an unknown rope type or key, or two places that contradict each other.
        """
        config = Fields(values, "config.json")
        if dim % 2:
            raise config.fail("rope width", "an even number", dim)
        rope = _rope_section(config)
        theta = _theta(config, rope)
        kind = _kind(rope)
        if kind == "default":
            return cls(dim=dim, theta=theta)
        return cls(
            dim=dim,
            theta=theta,
            factor=_stretch(rope),
            original_max_positions=rope.integer("original_max_position_embeddings"),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0, positive=False),
            truncate=rope.flag("truncate", True),
            amplitude=_amplitude(rope, kind),
        )

    @property
    def score_factor(self) -> float:
        """Factor of the MLA softmax scale: the square of YaRN's mscale at `mscale_all_dim`, 1 for plain rope."""
        return 1.0 if self.factor is None else yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return 0.1 mscale ln(factor) + 1, and 1 for factors up to 1 (YaRN paper, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _rope_section(config: Fields) -> Fields:
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new is not None and old is not None:
        for key in set(new.values) & set(old.values):
            if new.values[key] != old.values[key]:
                raise new.fail(key, f"rope_scaling's value {old.values[key]!r}", new.values[key])
    section = new or old or Fields({}, f"{config.where}: rope_parameters")
    section.only(_KEYS)
    section.choice("partial_rotary_factor", (1, 1.0), 1.0)
    return section


def _theta(config: Fields, rope: Fields) -> float:
    inner, outer = rope.number("rope_theta", None), config.number("rope_theta", None)
    if inner is None and outer is None:
        raise config.fail("rope_theta", "a number above 0", "nothing")
    if inner is not None and outer is not None and inner != outer:
        raise config.fail("rope_theta", f"the value {inner} of {rope.where}", outer)
    theta = inner if inner is not None else outer
    if theta <= 1:
        raise config.fail("rope_theta", "a number above 1", theta)
    return theta


def _kind(rope: Fields) -> str:
    allowed = ("default", *_YARN_KINDS)
    kind = rope.choice("rope_type", allowed, None)
    legacy = rope.choice("type", allowed, None)
    if kind is not None and legacy is not None and kind != legacy:
        raise rope.fail("type", f"rope_type's value {kind!r}", legacy)
    chosen = kind or legacy
    if chosen is None and rope.get("factor", None) is not None:
        raise rope.fail("rope_type", " or ".join(map(repr, allowed)), "nothing")
    return chosen or "default"


def _stretch(rope: Fields) -> float:
    factor = rope.number("factor")
    if factor < 1:
        raise rope.fail("factor", "a number of at least 1", factor)
    return factor


def _amplitude(rope: Fields, kind: str) -> float:
    """Return the factor of cos and sin: transformers' rule for `yarn`, DeepSeek's code for `deepseek_yarn`."""
    given = rope.number("attention_factor", None)
    if given is not None:
        return given
    factor = _stretch(rope)
    mscale, all_dim = rope.number("mscale", None, positive=False), rope.number("mscale_all_dim", 0.0, positive=False)
    if kind == "deepseek_yarn":
        return yarn_mscale(factor, 1.0 if mscale is None else mscale) / yarn_mscale(factor, all_dim)
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor, 1.0)
