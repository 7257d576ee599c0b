"""Writes directories of the published forms with random weights, at any size: `python -m kdlab.model.synthetic OUT`.

Kimi K2.6: 64 shards, 208,550 tensors of which 335 belong to the vision tower and its projector, routed experts in INT4
`pack-quantized`. The drafter: 69 tensors in one file. Names, dtypes and layout are the same at every scale.
"""

import argparse
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdlab.checks import check_choice, check_int
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.config_fields import read_json_object
from kdlab.errors import ArgumentError, KdlabError
from kdlab.model.checkpoint import INDEX, SINGLE
from kdlab.model.synthetic_tensors import (
    Tensor,
    Vision,
    drafter_tensors,
    random_values,
    target_tensors,
    vision_tensors,
)
from kdlab.paths import K26_SHAPES

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """What differs from the published constants."""

    text: dict[str, int]
    drafter: dict[str, int]
    vision: Vision


_TINY_TEXT = {
    "vocab_size": 512, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 32,
    "moe_intermediate_size": 32,
}  # fmt: skip
_TINY_DRAFTER = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8, "intermediate_size": 32}
SCALES = {
    "tiny": Scale(_TINY_TEXT, _TINY_DRAFTER, Vision(32, 32, 4, 4, num_attention_heads=2)),
    "full": Scale({}, {}, Vision(1152, 4304, 64, 64, num_attention_heads=16)),
}
"""tiny: all layers, experts and names in 75 MB. full: the published shapes, 554 GiB with all 61 layers."""


def write_target(
    directory: str | Path,
    *,
    scale: str = "tiny",
    shards: int | None = None,
    seed: int = 0,
    changes: Mapping[str, int] | None = None,
) -> None:
    """Write a target.

    Args:
        directory: new or empty.
        scale: a name of SCALES.
        shards: files, at most one a layer and three more; None takes that many, which are 64 for 61 layers.
        seed: of the values.
        changes: constants of `text_config` that differ from the scale's, `num_hidden_layers` and `n_routed_experts`
            for instance.

    Raises:
        ArgumentError: a value out of range, a directory that holds something, or a disk that is too small.
        ConfigError: `changes` make a config that kdlab does not run.
    """
    check_choice("scale", scale, tuple(SCALES))
    config = target_json(scale, changes or {})
    parsed = TargetConfig.from_dict(config)
    groups = target_tensors(parsed) + vision_tensors(SCALES[scale].vision, parsed.hidden_size)
    count = check_int("shards", len(groups) if shards is None else shards, minimum=1, maximum=len(groups))
    files: list[list[Tensor]] = [[] for _ in range(count)]
    for i, group in enumerate(groups):
        files[i * count // len(groups)] += group
    folder = _new_folder(directory, sum(tensor.nbytes for group in groups for tensor in group))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{count:06d}.safetensors"
        _write_shard(folder / name, tensors, [seed, number])
        weight_map |= {tensor.name: name for tensor in tensors}
    total = sum(tensor.nbytes for tensors in files for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_json(folder / "config.json", config)


def write_drafter(
    directory: str | Path, target: str | Path, *, scale: str = "tiny", seed: int = 0, changes: Mapping[str, Any] = {}
) -> None:
    """Write a drafter for the target in the directory `target`; the other arguments are those of `write_target`."""
    check_choice("scale", scale, tuple(SCALES))
    config = drafter_json(read_json_object(Path(target) / "config.json")["text_config"], scale, changes)
    tensors = drafter_tensors(DrafterConfig.from_dict(config))
    folder = _new_folder(directory, sum(tensor.nbytes for tensor in tensors))
    _write_shard(folder / SINGLE, tensors, [seed, 0])
    _write_json(folder / "config.json", config)


def target_json(scale: str, changes: Mapping[str, int]) -> dict[str, Any]:
    """Return the published config.json with the constants of the scale and these changes; special ids stay the last."""
    config = read_json_object(K26_SHAPES / "target" / "config.json")
    text = config["text_config"]
    before = text["vocab_size"]
    text |= SCALES[scale].text | dict(changes)
    for section in (config, text):
        section |= {key: section[key] - before + text["vocab_size"] for key in _IDS if key in section}
    vision = dataclasses.asdict(SCALES[scale].vision)
    merge = vision.pop("merge")
    config["vision_config"] = vision | {"merge_kernel_size": [merge, merge]}
    return config | {"projection_hidden_size": vision["hidden_size"]}


def drafter_json(text: Mapping[str, Any], scale: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published drafter's config.json, for the target whose `text_config` is given."""
    config = read_json_object(K26_SHAPES / "drafter" / "config.json")
    inner, layers = config["dflash_config"], text["num_hidden_layers"]
    inner["mask_token_id"] += text["vocab_size"] - config["vocab_size"]
    inner["target_layer_ids"] = [tap for tap in inner["target_layer_ids"] if tap < layers] or [layers - 1]
    shared = {"hidden_size": text["hidden_size"], "vocab_size": text["vocab_size"], "num_target_layers": layers}
    return config | SCALES[scale].drafter | shared | dict(changes)


def _new_folder(directory: str | Path, nbytes: int) -> Path:
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ArgumentError("directory", "a new or empty directory", str(folder))
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ArgumentError("directory", f"a disk with {nbytes / 2**30:.1f} GiB left", f"{free / 2**30:.1f} GiB")
    return folder


def _write_shard(path: Path, tensors: Sequence[Tensor], seed: Sequence[int]) -> None:
    # As safetensors writes them: the widest dtype first, then by name.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.nbytes // math.prod(tensor.shape), tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.Generator(np.random.SFC64(seed))
    with path.open("wb", buffering=1 << 20) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            for values in random_values(tensor, random):
                file.write(values.tobytes())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m kdlab.model.synthetic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", metavar="OUT", help="directory of the target, new or empty")
    parser.add_argument("--scale", default="tiny", choices=SCALES, help="(default: %(default)s)")
    parser.add_argument("--shards", type=int, metavar="N", help="(default: one a layer and three more, 64 in all)")
    parser.add_argument("--layers", type=int, metavar="N", help="fewer layers than 61")
    parser.add_argument("--experts", type=int, metavar="N", help="fewer routed experts a layer than 384")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--drafter", metavar="OUT2", help="write a drafter here too")
    arguments = parser.parse_args(argv)
    changes = {"num_hidden_layers": arguments.layers, "n_routed_experts": arguments.experts}
    given = {key: value for key, value in changes.items() if value is not None}
    try:
        write_target(
            arguments.out, scale=arguments.scale, shards=arguments.shards, seed=arguments.seed, changes=given
        )
        if arguments.drafter:
            write_drafter(arguments.drafter, arguments.out, scale=arguments.scale, seed=arguments.seed)
    except (KdlabError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
