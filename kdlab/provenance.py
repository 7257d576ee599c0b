"""Where a result comes from: one JSON-able dictionary that every recorded run and every result row carries."""

import dataclasses
import math
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdlab.errors import ArgumentError
from kdlab.machine import machine_facts
from kdlab.source import code_facts

RUN_FIELDS = (
    "target_sha256", "drafter_sha256", "target_config", "drafter_config",
    "prompt_set_id", "prompt_set_digest", "template_hash", "thinking",
    "method", "budget", "width", "top_k", "block_size", "max_new_tokens", "stop_token_ids",
    "temperature", "top_p", "seed", "streams", "graph", "impl", "device", "dtype",
)  # fmt: skip
"""What the caller knows of its run; a field that it does not give stands as None."""

COMPARED_FIELDS = (
    "target_sha256", "drafter_sha256", "prompt_set_digest", "template_hash", "thinking",
    "max_new_tokens", "temperature", "top_p", "streams", "graph", "dtype",
)  # fmt: skip
"""What must be equal in results that stand side by side, the field that the comparison is about excepted."""


def run_provenance(**fields: Any) -> dict[str, Any]:
    """Describe a run that starts now: code, machine and the caller's fields.

    Args:
        fields: `RUN_FIELDS` and any others, kept under their names. Tuples, sets, dataclasses, paths, dtypes, devices
            and numpy or one-element torch numbers become their JSON form; sets are sorted.

    Returns:
        A dictionary that `json.dumps` writes and `json.loads` gives back equal; unknown facts are None.

    Raises:
        ArgumentError: a field has no JSON form, or is one that this function states by itself.
    """
    own = {"run_id": str(uuid.uuid4()), "started_utc": datetime.now(UTC).isoformat(timespec="milliseconds")}
    device = fields.get("device")
    own |= code_facts() | machine_facts(None if device is None else torch.device(device))
    for name in fields:
        if name in own:
            raise ArgumentError(name, "a field that kdlab does not state by itself", fields[name])
    return own | dict.fromkeys(RUN_FIELDS) | {name: _to_json(name, value) for name, value in fields.items()}


def _to_json(name: str, value: Any) -> Any:
    """Return the JSON form of `value`; `name` is where it stands, for the error."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device | Path):
        return str(value)
    return _container_to_json(name, value)


def _container_to_json(name: str, value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _to_json(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_to_json(f"{name}[{i}]", item) for i, item in enumerate(value)]
    raise ArgumentError(name, "a value with a JSON form (finite numbers, text, lists, dictionaries)", repr(value))
