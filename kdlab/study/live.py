"""The sweep's table from live decoding: arms take turns, so that what is there at any moment compares them fairly."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from kdlab.checks import check_int
from kdlab.decode import Engine, start
from kdlab.decode.decoding import decode_provenance
from kdlab.errors import ArgumentError
from kdlab.model.pair import Pair
from kdlab.model.prompts import PromptSet, as_prompt_set
from kdlab.study.compare import ACCEPTANCE_FIELDS, check_table, is_simulated
from kdlab.study.walk import COLUMNS, rounds_row

CHECK_COLUMNS = ("method", "setting", "num_prompts", "num_rounds", "predicted_rounds", "equal_prompts", "far")
NEAR_TIES = 0.25
"""Share of the rounds by which near ties may change their number; a draft that is never accepted changes far more."""

Arm = tuple[str, int]
"""A method, and its budget or chain length (0 of AR)."""


def whole_groups(files: Sequence[PromptSet], count: int, streams: int = 1) -> PromptSet:
    """Take the first prompts of each file in whole groups, so that what is decoded together is of one file.

    Args:
        files: sets of prompts, at least one.
        count: prompts wanted of each; rounded up to whole groups, as far as the file has them.
        streams: prompts of a group.

    Raises:
        ArgumentError: a number is below 1, there is no file, or a file has no whole group.
    """
    count, streams = check_int("count", count, minimum=1), check_int("streams", streams, minimum=1)
    for file in files:
        if len(file) < streams:
            raise ArgumentError("streams", f"at most {len(file)}, the prompts of {file.id!r}", streams)
    wanted = -(-count // streams) * streams
    first = [prompt for file in files for prompt in file.prompts[: min(wanted, len(file) // streams * streams)]]
    return PromptSet.of("+".join(file.id for file in files), first)


def sweep_live(
    pair: Pair, prompts: object, arms: Sequence[Arm], *, streams: int = 1, **options: Any
) -> Iterator[pd.DataFrame | None]:
    """Decode groups of prompts live, every arm in turn, and give the table of `sweep` turn by turn.

    Args:
        pair, prompts: as in `kdlab.generate`.
        arms: distinct (method, budget) of "ar", "chain" or "ddtree".
        streams: prompts of a group, decoded together.
        options: further keywords of `kdlab.generate`: max_new_tokens, temperature and others.

    Yields:
        The rows of a turn, in which every arm decoded the same group; so those of any number of turns are a table for
        `summarize`. Before that None after every round: a moment at which the caller may go away.

    Raises:
        ArgumentError: no arm, one twice or of another method; and, as it runs, what `kdlab.generate` refuses.
    """
    chosen, streams = as_prompt_set(prompts), check_int("streams", streams, minimum=1)
    if not arms or len(set(arms)) < len(arms):
        raise ArgumentError("arms", "distinct arms, at least one", list(arms))
    wrong = [method for method, _ in arms if method not in ("ar", "chain", "ddtree")]
    if wrong:
        raise ArgumentError("arms", "methods ar, chain and ddtree", wrong[0])
    return _turns(pair, chosen, list(arms), streams, options)


def check_live(live: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Compare every live round with what a recording predicts.

    Args:
        live: rows of `sweep_live`.
        predicted: rows of the sweeps of a recording of the same prompts, with the arms of `live` among them.

    Returns:
        One row an arm: method, setting, num_prompts, num_rounds, predicted_rounds, equal_prompts (those whose rounds
        are all as long as predicted), and far: whether the rounds are so many more or fewer that it takes more than
        near ties of the target, which a narrow dtype settles by what else is in the batch.

    Raises:
        ArgumentError: an arm or a prompt of `live` was not predicted.
        ComparisonError: the two differ in provenance.
    """
    check_table(pd.concat([live[list(ACCEPTANCE_FIELDS)], predicted[list(ACCEPTANCE_FIELDS)]]))
    keys = ["method", "setting", "prompt"]
    wanted = dict(zip(zip(*(predicted[key] for key in keys), strict=True), predicted["round_lengths"], strict=True))
    rows: list[dict[str, Any]] = []
    for (method, setting), arm in live.groupby(keys[:2], sort=False):
        missing = [prompt for prompt in arm["prompt"] if (method, setting, prompt) not in wanted]
        if missing:
            raise ArgumentError("predicted", f"{method} {setting:g} of prompt {missing[0]}", "none")
        pairs = [(list(row["round_lengths"]), list(wanted[method, setting, row["prompt"]]))
                 for row in arm.to_dict("records")]  # fmt: skip
        num_rounds, predicted_rounds = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
        rows.append({
            "method": method, "setting": setting, "num_prompts": len(pairs),
            "num_rounds": num_rounds, "predicted_rounds": predicted_rounds,
            "equal_prompts": sum(found == expected for found, expected in pairs),
            "far": abs(num_rounds - predicted_rounds) > NEAR_TIES * predicted_rounds + 1,
        })  # fmt: skip
    return pd.DataFrame.from_records(rows, columns=list(CHECK_COLUMNS))


def _turns(
    pair: Pair, prompts: PromptSet, arms: list[Arm], streams: int, options: dict[str, Any]
) -> Iterator[pd.DataFrame | None]:
    engines: dict[Arm, Engine] = {}
    for method, budget in arms:
        engines[method, budget] = start(pair, prompts, method=method, budget=budget, streams=streams, **options)
        yield None
    # Nothing that differs from arm to arm is among the columns of the table.
    provenance = decode_provenance(pair, next(iter(engines.values())).settings, prompts)
    for turn, first in enumerate(range(0, len(prompts), streams)):
        rows: list[dict[str, Any]] = []
        # The arm that begins changes with every turn: a drift of the machine meets all of them.
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            engine = engines[arm]
            engine.admit()
            while engine.num_running:
                engine.step(admit=False)
                yield None
            rows += [_row(engine, index, provenance) for index in range(first, min(first + streams, len(prompts)))]
        yield pd.DataFrame.from_records(rows, columns=list(COLUMNS))


def _row(engine: Engine, index: int, provenance: dict[str, Any]) -> dict[str, Any]:
    """The rounds of one decoded prompt, as a row of the table."""
    method, prompt = engine.settings.method, engine.prompts.prompts[index]
    lengths = [record.num_tokens for record in engine.transcripts[index].rounds]
    arm = {"method": method.name, "setting": method.budget, "budget": method.budget, "truncated": False}
    place = {"prompt": index, "prompt_id": prompt.id, "kind": prompt.kind}
    common = {name: provenance.get(name) for name in ACCEPTANCE_FIELDS} | {"top_k": method.top_k}
    simulated = is_simulated(provenance, prompt.kind)
    return rounds_row(arm, place, lengths, [method.budget + 1] * len(lengths)) | common | {"simulated": simulated}
