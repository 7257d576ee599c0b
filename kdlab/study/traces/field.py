"""Draft fields that others recorded: their JSON lines, and what must agree between candidates, ranks and text."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdlab.decode.field import DraftField, PromptField
from kdlab.decode.field_table import FIELD_FORMAT, prompt_entry
from kdlab.decode.run_row import COUNT, IDS, TEXT, Rule
from kdlab.errors import ArgumentError
from kdlab.parquet import KIND_KEY, VERSION_KEY
from kdlab.study.traces.jsonl import Line
from kdlab.study.traces.rules import key_faults, provenance_faults, rule_faults

_HEADER_RULES: dict[str, Rule] = {name: ("a count of at least 1", lambda value: COUNT[1](value) and value >= 1)
                                  for name in ("top_k", "vocab_size", "depth_limit")}  # fmt: skip
_PROMPT_RULES: dict[str, Rule] = {
    "prompt": COUNT, "prompt_id": TEXT, "kind": TEXT, "prompt_ids": IDS, "tail_ids": IDS, "num_starts": COUNT,
    "num_positions": COUNT,
}  # fmt: skip
_LISTS = {"token_ids": np.int32, "log_probs": np.float32, "next_log_prob": np.float32, "next_rank": np.int32}
_KEYS = ("prompt_id", "kind", "prompt", "position", "output_id", *_LISTS)
_TOLERANCE = 1e-3  # nats: engines keep log-probabilities in single precision or less


def field_header(field: DraftField) -> dict[str, Any]:
    """Return the header line of a field: the run row of its Parquet form, with kind and version."""
    return {
        KIND_KEY: FIELD_FORMAT.kind,
        VERSION_KEY: FIELD_FORMAT.version,
        "provenance": dict(field.provenance),
        "top_k": field.top_k,
        "vocab_size": field.vocab_size,
        "depth_limit": field.depth_limit,
        "prompts": [prompt_entry(prompt) for prompt in field.prompts],
    }


def field_rows(field: DraftField) -> Iterator[dict[str, Any]]:
    """Yield a row a position: the columns of the Parquet form but the run id; what is not finite is null."""
    for prompt in field.prompts:
        names = {"prompt_id": prompt.prompt_id, "kind": prompt.kind, "prompt": prompt.prompt}
        for position, token in enumerate(prompt.output_ids.tolist()):
            lists = {name: _to_list(getattr(prompt, name)[position]) for name in _LISTS}
            yield names | {"position": position, "output_id": token} | lists


def read_field(path: Path, header: Mapping[str, Any], lines: Iterator[Line], faults: list[str]) -> DraftField | None:
    """Make a field of its JSON lines; None where something is wrong, which `faults` then says with the line.

    Args:
        path: named in the faults.
        header: the first line.
        lines: the others.
        faults: gets one sentence a fault.
    """
    found = _header_faults(header)
    faults += [f"{path}:1: {fault}" for fault in found]
    if found:
        return None
    entries = header["prompts"]
    owners = ((entry, position) for entry in entries for position in range(entry["num_positions"]))
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, row in lines:
        owner = next(owners, None)
        found = _row_faults(row, owner, header)
        faults += [f"{path}:{number}: {fault}" for fault in found]
        # As arrays at once: the numbers of a long field as Python objects take ten times the room. None becomes NaN.
        lists = {} if found else {name: np.array(row[name], dtype) for name, dtype in _LISTS.items()}
        rows.append((number, row | lists if isinstance(row, dict) else {}))
    expected = sum(entry["num_positions"] for entry in entries)
    if len(rows) < expected:
        faults.append(f"{path}: expected {expected} positions, as the header says, got {len(rows)}")
    if faults:
        return None
    try:
        field = _field(header, [row for _, row in rows])
    except ArgumentError as error:
        faults.append(f"{path}:1: {error}")
        return None
    faults += [f"{path}:{rows[index][0]}: {fault}" for index, fault in field_faults(field)]
    return None if faults else field


def field_faults(field: DraftField) -> Iterator[tuple[int, str]]:
    """Yield where candidates, probabilities, ranks and text contradict each other: (index of the row, sentence)."""
    offset = 0
    for prompt in field.prompts:
        for sentence, places in _contradictions(prompt, field.top_k):
            for position, slot in np.argwhere(places).tolist():
                yield offset + position, f"slot {slot}: {sentence}"
        offset += len(prompt.output_ids)


def _contradictions(prompt: PromptField, top_k: int) -> Iterator[tuple[str, np.ndarray]]:
    """Sentences, each with the places [T, L] bool where it is true; slots that are not finite say nothing."""
    usable = np.isfinite(prompt.log_probs).all(axis=-1)
    values = np.where(usable[..., None], prompt.log_probs.astype(np.float64), -np.inf)
    ordered = (values[..., 1:] <= values[..., :-1] + _TOLERANCE).all(axis=-1)
    yield "log_probs: expected the best candidate first", usable & ~ordered
    mass = np.exp(values).sum(axis=-1)
    yield "log_probs: expected probabilities of at most 1 in sum", usable & (mass > 1.0 + _TOLERANCE)
    distinct = (np.diff(np.sort(prompt.token_ids, axis=-1)) > 0).all(axis=-1)
    yield "token_ids: expected distinct tokens", usable & ~distinct
    hits = prompt.token_ids == prompt.next_ids[..., None]
    listed, rank = hits.any(axis=-1), hits.argmax(axis=-1)
    wrong = np.where(listed, prompt.next_rank != rank, prompt.next_rank < top_k)
    yield "next_rank: expected the place of the text's next token among the candidates", usable & wrong
    stated = np.take_along_axis(values, rank[..., None], axis=-1)[..., 0]
    apart = ~(np.abs(prompt.next_log_prob - stated) <= _TOLERANCE)
    yield "next_log_prob: expected what log_probs says of the text's next token", usable & listed & apart


def _header_faults(header: Mapping[str, Any]) -> list[str]:
    keys = (KIND_KEY, VERSION_KEY, "provenance", *_HEADER_RULES, "prompts")
    found = key_faults(header, keys)
    if found:
        return found
    found = provenance_faults(header["provenance"], of_rounds=False) + rule_faults(header, _HEADER_RULES)
    if not isinstance(header["prompts"], list) or not header["prompts"]:
        return [*found, f"prompts: expected a list of at least one, got {header['prompts']!r:.60}"]
    for index, entry in enumerate(header["prompts"]):
        where = f"prompts[{index}]"
        wrong = key_faults(entry, tuple(_PROMPT_RULES)) or rule_faults(entry, _PROMPT_RULES)
        if not wrong and entry["prompt"] != index:
            wrong = [f"prompt: expected {index}, got {entry['prompt']}"]
        found += [f"{where}: {fault}" for fault in wrong]
    return found


def _row_faults(row: object, owner: tuple[Mapping[str, Any], int] | None, header: Mapping[str, Any]) -> list[str]:
    if owner is None:
        return ["a position more than the header says"]
    found = key_faults(row, _KEYS)
    if found or not isinstance(row, Mapping):
        return found
    entry, position = owner
    expected = {name: entry[name] for name in ("prompt_id", "kind", "prompt")} | {"position": position}
    found = [f"{name}: expected {value!r}, got {row[name]!r:.60}" for name, value in expected.items()
             if row[name] != value]  # fmt: skip
    found += rule_faults(row, {"output_id": COUNT})
    slots, largest = header["depth_limit"], header["vocab_size"] - 1
    for name, dtype in _LISTS.items():
        size = slots * (header["top_k"] if name in ("token_ids", "log_probs") else 1)
        found += _list_faults(name, row[name], size, largest if dtype is np.int32 else None)
    return found


def _list_faults(name: str, values: object, size: int, largest: int | None) -> list[str]:
    if not isinstance(values, list) or len(values) != size:
        got = f"{len(values)} values" if isinstance(values, list) else f"{values!r:.60}"
        return [f"{name}: expected {size} values, got {got}"]
    if largest is None:
        bad = [value for value in values if value is not None and (type(value) not in (int, float) or value > 1e-3)]
        return [f"{name}: expected log-probabilities or null, got {bad[0]!r:.60}"] if bad else []
    bad = [value for value in values if type(value) is not int or not 0 <= value <= largest]
    return [f"{name}: expected integers of 0 to {largest}, got {bad[0]!r:.60}"] if bad else []


def _field(header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> DraftField:
    slots, top_k = header["depth_limit"], header["top_k"]
    prompts, start = [], 0
    for entry in header["prompts"]:
        own, start = rows[start : start + entry["num_positions"]], start + entry["num_positions"]
        arrays = {}
        for name, dtype in _LISTS.items():
            shape = (len(own), slots, top_k) if name in ("token_ids", "log_probs") else (len(own), slots)
            arrays[name] = np.array([row[name] for row in own], dtype).reshape(shape)
        prompts.append(
            PromptField(
                prompt=entry["prompt"],
                prompt_id=entry["prompt_id"],
                kind=entry["kind"],
                prompt_ids=np.array(entry["prompt_ids"], np.int32),
                output_ids=np.array([row["output_id"] for row in own], np.int32),
                tail_ids=np.array(entry["tail_ids"], np.int32),
                num_starts=entry["num_starts"],
                **arrays,
            )
        )
    return DraftField(prompts, top_k, header["vocab_size"], slots, header["provenance"])


def _to_list(values: np.ndarray) -> list[Any]:
    flat = values.reshape(-1)
    if flat.dtype.kind != "f" or np.isfinite(flat).all():
        return flat.tolist()
    return [value if np.isfinite(value) else None for value in flat.tolist()]
