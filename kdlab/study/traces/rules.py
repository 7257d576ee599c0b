"""What a trace must hold: rules for its provenance and for each of its rounds; every fault is a sentence."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kdlab.decode.run_row import COUNT, OPTIONAL_TEXT, Rule

METHODS = ("ar", "chain", "ddtree", "beam", "tree")
"""What made the rounds; `tree` is any tree that is neither a DDTree nor a beam, such as an EAGLE tree."""

_NAME: Rule = ("a text that is not empty", lambda value: isinstance(value, str) and value.strip() != "")
_POSITIVE: Rule = ("a count of at least 1", lambda value: COUNT[1](value) and value >= 1)
_FLAG: Rule = ("true or false", lambda value: isinstance(value, bool))
_OPTIONAL_FLAG: Rule = ("true, false or null", lambda value: value is None or isinstance(value, bool))
_OPTIONAL_COUNT: Rule = ("a count or null", lambda value: value is None or COUNT[1](value))
_TEMPERATURE: Rule = ("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
_SHARE: Rule = ("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1)
_METHOD: Rule = ("one of " + ", ".join(METHODS), lambda value: value in METHODS)
_PARENTS: Rule = (
    "a list of integers or null",
    lambda value: value is None or (isinstance(value, list) and all(type(item) is int for item in value)),
)

# What decides acceptance must be known; what nobody can say of a served model may be null, and is then not known.
PROVENANCE_RULES: dict[str, Rule] = {
    "prompt_set_id": _NAME, "max_new_tokens": _POSITIVE, "temperature": _TEMPERATURE, "top_p": _SHARE, "dtype": _NAME,
    "target_sha256": OPTIONAL_TEXT, "drafter_sha256": OPTIONAL_TEXT, "prompt_set_digest": OPTIONAL_TEXT,
    "template_hash": OPTIONAL_TEXT, "thinking": _OPTIONAL_FLAG, "streams": _OPTIONAL_COUNT, "graph": OPTIONAL_TEXT,
    "gpu": OPTIONAL_TEXT,
}  # fmt: skip
ENGINE_RULES: dict[str, Rule] = {"engine": _NAME, "target": _NAME, "drafter": _NAME, "simulated": _FLAG}
"""Asked of everybody but kdlab, whose recordings hold `kdlab_version` and the hashes of their models' bytes."""
ROUND_PROVENANCE_RULES: dict[str, Rule] = {"method": _METHOD, "budget": COUNT}
ROUND_RULES: dict[str, Rule] = {
    "prompt_id": _NAME, "kind": _NAME, "round": COUNT, "accepted": COUNT, "drafted": COUNT, "parents": _PARENTS,
}  # fmt: skip
OPTIONAL_KEYS = ("parents",)


def provenance_faults(provenance: object, *, of_rounds: bool) -> list[str]:
    """Say what a trace's provenance lacks or holds wrongly, a sentence a field."""
    if not isinstance(provenance, Mapping):
        return [f"provenance: expected an object, got {provenance!r:.60}"]
    rules = PROVENANCE_RULES | ({} if "kdlab_version" in provenance else ENGINE_RULES)
    return rule_faults(provenance, rules | (ROUND_PROVENANCE_RULES if of_rounds else {}), "provenance.")


def rule_faults(values: Mapping[str, Any], rules: Mapping[str, Rule], prefix: str = "") -> list[str]:
    """Say which keys are missing or hold something else than their rule expects."""
    return [
        f"{prefix}{key}: expected {expected}, got {f'{values[key]!r:.60}' if key in values else 'nothing'}"
        for key, (expected, is_good) in rules.items()
        if key not in values or not is_good(values[key])
    ]


def key_faults(row: object, keys: Sequence[str], optional: Sequence[str] = ()) -> list[str]:
    """Say whether `row` is no object, lacks a key, or has one that no rule knows."""
    if not isinstance(row, Mapping):
        return [f"expected an object, got {row!r:.60}"]
    missing = [key for key in keys if key not in row and key not in optional]
    unknown = sorted(set(row) - set(keys))
    words = [f"missing {', '.join(missing)}"] if missing else []
    words += [f"unknown {', '.join(map(str, unknown))}"] if unknown else []
    return [f"expected the keys {', '.join(keys)}; {'; '.join(words)}"] if words else []


class RoundChecker:
    """Checks the rounds of a trace one after another: each by itself, and its place among those before it."""

    def __init__(self, method: str, budget: int) -> None:
        self._method, self._budget = method, budget
        self._kinds: dict[str, str] = {}
        self._prompt: str | None = None
        self._next_round = 0

    def faults(self, row: object) -> list[str]:
        """Say what is wrong with the next round; none: it is taken."""
        found = key_faults(row, tuple(ROUND_RULES), OPTIONAL_KEYS)
        if found or not isinstance(row, Mapping):
            return found
        found = rule_faults(row, {key: rule for key, rule in ROUND_RULES.items() if key in row})
        return found or self._order_faults(row) + self._size_faults(row) + self._tree_faults(row)

    def _order_faults(self, row: Mapping[str, Any]) -> list[str]:
        prompt_id, kind = row["prompt_id"], row["kind"]
        if prompt_id != self._prompt and prompt_id in self._kinds:
            return [f"prompt_id: the rounds of {prompt_id!r} do not stand together"]
        if prompt_id != self._prompt:
            self._prompt, self._next_round, self._kinds[prompt_id] = prompt_id, 0, kind
        expected, self._next_round = self._next_round, row["round"] + 1
        found = [] if row["round"] == expected else [f"round: expected {expected}, got {row['round']}"]
        known = self._kinds[prompt_id]
        return found + ([] if kind == known else [f"kind: expected {known!r} as in the round before, got {kind!r}"])

    def _size_faults(self, row: Mapping[str, Any]) -> list[str]:
        found = []
        if row["drafted"] > self._budget:
            found.append(f"drafted: expected at most the budget {self._budget}, got {row['drafted']}")
        if row["accepted"] > row["drafted"]:
            found.append(f"accepted: expected at most the {row['drafted']} drafted, got {row['accepted']}")
        return found

    def _tree_faults(self, row: Mapping[str, Any]) -> list[str]:
        parents = row.get("parents")
        if parents is None:
            return []
        if len(parents) != row["drafted"] + 1 or parents[0] != -1:
            return [f"parents: expected -1 of the root, then {row['drafted']} nodes, got {parents!r:.60}"]
        depths = [0]
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                return [f"parents: node {node}: expected a node before it, got {parent}"]
            if self._method == "chain" and parent != node - 1:
                return [f"parents: node {node}: expected {node - 1} in a chain, got {parent}"]
            depths.append(depths[parent] + 1)
        if row["accepted"] > max(depths):
            return [f"accepted: expected at most the tree's depth {max(depths)}, got {row['accepted']}"]
        return []


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
