"""Whether a model fits in memory: bytes of one rank and the ranks it takes, and what is wrong with its files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kdlab.checks import check_int
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.config_fields import read_json_object
from kdlab.errors import ArgumentError, CheckpointError, UnsupportedDevice
from kdlab.model.cache import LatentCache
from kdlab.model.checkpoint import INDEX, SINGLE, weight_map
from kdlab.model.drafter import Drafter
from kdlab.model.ranks import Ranks
from kdlab.model.reading import stored_names
from kdlab.model.shard import Shard
from kdlab.model.target import Target, plan_target
from kdlab.model.target_tensors import PREFIX, VISION

WORKSPACE_BYTES = 6 << 30
"""Room a GPU is taken to need beside weights and caches: CUDA's context, NCCL, captured graphs, a prefill chunk."""
RANKS = (1, 2, 4, 8, 16, 32)
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes that one rank of several holds, the rank with most of them."""

    ranks: int
    weights: int
    cache: int  # the latent cache, whole on every rank
    drafter: int
    draft_context: int
    workspace: int = WORKSPACE_BYTES

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.drafter + self.draft_context + self.workspace


def rank_bytes(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    ranks: Ranks,
    *,
    context: int,
    streams: int = 1,
) -> RankBytes:
    """Count the bytes of one rank in bfloat16, with INT4 experts packed; nothing is allocated.

    Args:
        target: constants of the target.
        drafter: constants of its drafter, if any.
        ranks: which of how many, and how they split experts.
        context: tokens of each stream that both caches have room for.
        streams: S.

    Raises:
        ArgumentError: the ranks do not divide the model, or a number is out of range.
    """
    check_int("context", context, minimum=1)
    check_int("streams", streams, minimum=1)
    model = Target(target, dtype=_DTYPE, device="meta", packed=target.experts_int4, ranks=ranks)
    cache = LatentCache.allocate(target, streams, context, _DTYPE, "meta").pages.nbytes
    if drafter is None:
        return RankBytes(ranks.size, _weights(model), cache, 0, 0)
    draft = Drafter(drafter, dtype=_DTYPE, device="meta", ranks=ranks)
    seen = draft.new_context(streams, context, "meta", _DTYPE)
    return RankBytes(ranks.size, _weights(model), cache, _weights(draft), seen.keys.nbytes + seen.values.nbytes)


def rank_table(
    target: TargetConfig, drafter: DrafterConfig | None, *, experts: str = "tp", context: int, streams: int = 1
) -> list[RankBytes]:
    """Return `rank_bytes` for every number of RANKS that divides the model."""
    table = []
    for size in RANKS:
        try:
            table.append(
                rank_bytes(target, drafter, Ranks.slice_of(0, size, experts), context=context, streams=streams)
            )
        except ArgumentError as error:
            if error.argument != "ranks":
                raise
    return table


def ranks_needed(table: Sequence[RankBytes], gpu_bytes: int) -> int | None:
    """Return the fewest ranks whose share fits in a GPU of so many bytes, or None."""
    return next((row.ranks for row in table if row.total <= gpu_bytes), None)


def inspect_index(directory: str | Path, target: TargetConfig) -> dict[str, Any]:
    """Compare the index with the names that the config asks for, and read the headers of the files that are there.

    Where all are there, tensors are checked as before they are read to a GPU.

    Returns:
        `tensors`, `vision_tensors` and `tensor_bytes` as the index states them, None without one; `files`, `files_here`
        and `file_bytes`; and `problems`, one line each.

    Raises:
        CheckpointError: the index cannot be read.
    """
    folder = Path(directory)
    facts: dict[str, Any] = dict.fromkeys(("tensors", "vision_tensors", "tensor_bytes"))
    files, problems = [SINGLE], list[str]()
    if (folder / INDEX).is_file():
        index = weight_map(folder)
        files, problems = sorted(set(index.values())), _differences(index, target)
        metadata = read_json_object(folder / INDEX).get("metadata")
        facts = {
            "tensors": len(index),
            "vision_tensors": sum(name.startswith(VISION) for name in index),
            "tensor_bytes": metadata.get("total_size") if isinstance(metadata, dict) else None,
        }
    here = [folder / name for name in files if (folder / name).is_file()]
    sizes = {
        "files": len(files),
        "files_here": len(here),
        "file_bytes": sum(path.stat().st_size for path in here),
    }
    problems += [line for path in here for line in _refusal(partial(Shard, path))]
    if not problems and len(here) == len(files):
        problems = _refusal(partial(plan_target, folder, device="cuda", dtype=_DTYPE))
    return facts | sizes | {"problems": problems}


def _refusal(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except CheckpointError as error:
        return [str(error)]
    return []


def _differences(index: Mapping[str, str], target: TargetConfig) -> list[str]:
    whole = Target(target, dtype=_DTYPE, device="meta", packed=target.experts_int4)
    wanted = stored_names(whole.views(), int4=target.experts_int4)
    found = {name.removeprefix(PREFIX) for name in index if not name.startswith(VISION)}
    kinds = {"lacks": wanted - found, "has unknown": found - wanted}
    return [f"the index {verb} tensors, {len(names)} in all: {min(names)}" for verb, names in kinds.items() if names]


def check_room(nbytes: int, device: torch.device) -> None:
    """Raise UnsupportedDevice where a device has less free memory than weights of `nbytes` take.

    A CPU's is what Linux calls available; elsewhere it is not known, and nothing is refused.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_bytes()
    if free is not None and nbytes > free:
        raise UnsupportedDevice(
            f"{device}: expected {nbytes / 2**30:.1f} GiB of free memory for the weights, got {free / 2**30:.1f} GiB; "
            "`kdlab doctor --model DIR` says how many ranks they need"
        )


def _available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found[1]) << 10


def _weights(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
