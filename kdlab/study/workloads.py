"""Acceptance of a kind of text by every arm, and workloads that mix kinds: the half of a speed that is no time.

A workload is kinds with shares: so many of its rounds are as hard as this kind's. That puts workloads on one line, from
hard to easy text, on which a published figure has a place: where the line's own arm yields as many tokens per round.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from kdlab.checks import check_float
from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study.bootstrap import ratio, resample_counts
from kdlab.study.compare import check_table

Arm = tuple[str, float]
"""(method, setting)."""


@dataclass(frozen=True, eq=False)
class Profile:
    """What A arms yield on the P prompts of one kind of text.

    Attributes:
        name: of the kind.
        arms: A arms.
        rows: R numbers of verified rows that occur.
        tokens: [A, P] f64, bonus included.
        rounds: [A, R, P] f64, by their verified rows.
    """

    name: str
    arms: tuple[Arm, ...]
    rows: tuple[int, ...]
    tokens: np.ndarray
    rounds: np.ndarray

    @classmethod
    def of(cls, table: pd.DataFrame, name: str) -> "Profile":
        """Gather the rows of sweeps.

        Args:
            table: one row an arm and prompt, see `kdlab.study.sweep_file.sweep_arms`; of one recording.
            name: of the kind.

        Raises:
            ArgumentError: there is no row, or no round.
            ComparisonError: rows differ in provenance, or arms in their prompts.
        """
        if table.empty or not table["num_rounds"].sum():
            raise ArgumentError("table", f"rounds of {name}", "none")
        check_table(table)
        groups = {(str(method), float(setting)): group.sort_values("prompt")
                  for (method, setting), group in table.groupby(["method", "setting"], sort=False)}  # fmt: skip
        prompts = table["prompt"].drop_duplicates().sort_values().tolist()
        rows = tuple(sorted({int(count) for counts in table["round_rows"] for count in counts}))
        tokens, rounds = [], []
        for (method, setting), group in groups.items():
            if group["prompt"].tolist() != prompts:
                raise ComparisonError(f"prompt: {method} {setting:g} has other prompts than the arms before it")
            counts = [Counter(listed) for listed in group["round_rows"]]
            tokens.append([sum(lengths) for lengths in group["round_lengths"]])
            rounds.append([[count[number] for count in counts] for number in rows])
        return cls(name, tuple(groups), rows, np.array(tokens, dtype=float), np.array(rounds, dtype=float))


@dataclass(frozen=True, eq=False)
class Workload:
    """Kinds of text and their shares of a workload's rounds; the shares sum to 1, all kinds have the same arms."""

    parts: tuple[tuple[Profile, float], ...]

    def __post_init__(self) -> None:
        if not self.parts or abs(sum(share for _, share in self.parts) - 1.0) > 1e-9:
            raise ArgumentError("parts", "shares that sum to 1", [share for _, share in self.parts])
        if any(profile.arms != self.arms for profile, _ in self.parts):
            raise ArgumentError("parts", "kinds with the same arms", [profile.name for profile, _ in self.parts])

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Of every kind."""
        return self.parts[0][0].arms

    def tokens_per_round(self, method: str, setting: float) -> float:
        """Return what one arm yields a round, bonus included.

        Raises:
            ArgumentError: the workload has no such arm.
        """
        if (method, float(setting)) not in self.arms:
            raise ArgumentError("setting", f"an arm of {sorted({name for name, _ in self.arms})}", (method, setting))
        place = self.arms.index((method, float(setting)))
        return float(sum(share * profile.tokens[place].sum() / profile.rounds[place].sum()
                         for profile, share in self.parts))  # fmt: skip

    def yields(self, num_resamples: int | None = None, seed: int = 0) -> "Yields":
        """Return what every arm yields, of every prompt once (the leading axis is 1 long) or of resampled prompts.

        Args:
            num_resamples: n; the prompts of each kind are drawn with replacement, kinds independently of each other.
            seed: of the draws.
        """
        tokens: np.ndarray | float = 0.0
        rows = sorted({number for profile, _ in self.parts for number in profile.rows})
        parts: list[np.ndarray | float] = [0.0] * len(rows)
        for place, (profile, share) in enumerate(self.parts):
            prompts = profile.tokens.shape[1]
            drawn = num_resamples and resample_counts(prompts, num_resamples, seed + place)
            weights = np.ones((1, prompts)) if num_resamples is None else drawn
            rounds = weights @ profile.rounds.sum(axis=1).T
            tokens = tokens + share * ratio(weights @ profile.tokens.T, rounds)
            for column, number in enumerate(profile.rows):
                part = share * ratio(weights @ profile.rounds[:, column].T, rounds)
                parts[rows.index(number)] = parts[rows.index(number)] + part
        shares = np.stack(np.broadcast_arrays(*parts), axis=-1)
        return Yields(self.arms, np.array(rows), np.asarray(tokens), shares)


@dataclass(frozen=True, eq=False)
class Yields:
    """Tokens per round of A arms, and how their rounds spread over R numbers of verified rows, for n draws of prompts.

    Attributes:
        arms: A arms.
        rows: [R] int, ascending.
        tokens: [n, A] f64.
        shares: [n, A, R] f64, of the rounds; they sum to 1 over R.
    """

    arms: tuple[Arm, ...]
    rows: np.ndarray
    tokens: np.ndarray
    shares: np.ndarray

    def speeds(self, round_us: Callable[[int, str], float], streams: int = 1) -> np.ndarray:
        """Return tokens per microsecond of one stream: [n, A].

        Rounds of one stream take the mean of their times. Of more streams, whose rows differ within a round, a round is
        taken to verify their mean number of rows: packed without padding, and with no luck in how they fall together.

        Args:
            round_us: (rows of a stream, method) to microseconds of a round of all streams.
            streams: S.
        """
        times = np.empty_like(self.tokens)
        for part in self._parts:
            us = np.array([round_us(number, part.method) for number in part.rows.tolist()])
            mean = part.shares @ us if streams == 1 else np.interp(part.mean_rows, part.rows, us)
            times[:, part.chosen] = mean
        return np.asarray(self.tokens / times)

    @cached_property
    def _parts(self) -> tuple["_Part", ...]:
        parts = []
        for method in dict.fromkeys(method for method, _ in self.arms):
            chosen = np.array([name == method for name, _ in self.arms])
            shares = self.shares[:, chosen]
            used = shares.any(axis=(0, 1))
            shares, rows = np.ascontiguousarray(shares[..., used]), self.rows[used]
            parts.append(_Part(method, chosen, rows, shares, shares @ rows))
        return tuple(parts)


class _Part(NamedTuple):
    """The arms of one method: which they are, the rows that they verify, [n, A, R] shares and [n, A] mean rows."""

    method: str
    chosen: np.ndarray
    rows: np.ndarray
    shares: np.ndarray
    mean_rows: np.ndarray


@dataclass(frozen=True, eq=False)
class Line:
    """Kinds of text from hard to easy, and every mix of two neighbours: an axis for workloads.

    Attributes:
        profiles: in ascending order of tokens per round of `arm`.
        arm: whose tokens per round are the axis.
    """

    profiles: tuple[Profile, ...]
    arm: Arm = ("chain", 3.0)

    @classmethod
    def of(cls, profiles: Mapping[str, Profile], arm: Arm = ("chain", 3.0)) -> "Line":
        """Put kinds in order.

        Raises:
            ArgumentError: fewer than two kinds, or two that are equally hard.
        """
        ordered = sorted(profiles.values(), key=lambda one: Workload(((one, 1.0),)).tokens_per_round(*arm))
        line = cls(tuple(ordered), arm)
        if len(ordered) < 2 or (np.diff(line.places()) <= 0).any():
            raise ArgumentError("profiles", "at least two kinds, none as hard as another", list(profiles))
        return line

    def places(self, arm: Arm | None = None) -> np.ndarray:
        """Tokens per round of an arm at every kind, by default of the axis' own."""
        return np.array([Workload(((one, 1.0),)).tokens_per_round(*(arm or self.arm)) for one in self.profiles])

    def at(self, place: float) -> Workload:
        """Return the workload whose axis arm yields `place` tokens per round.

        Raises:
            ArgumentError: the place is off the line.
        """
        places = self.places()
        check_float("place", place, minimum=float(places[0]), maximum=float(places[-1]))
        high = int(np.clip(np.searchsorted(places, place), 1, len(places) - 1))
        share = (place - places[high - 1]) / (places[high] - places[high - 1])
        return Workload(((self.profiles[high - 1], 1.0 - share), (self.profiles[high], share)))

    def place_of(self, arm: Arm, tokens_per_round: float) -> float:
        """Return where the line's own `arm` yields so many tokens per round; NaN off the line, or without such an arm.

        It is how a figure of one arm (a published one, a trace's) gets a place among workloads: taken to be a mix of
        the line's kinds.
        """
        if (arm[0], float(arm[1])) not in self.profiles[0].arms:
            return float("nan")
        places = self.places(arm)
        if (np.diff(places) <= 0).any():  # this arm puts the kinds in another order: no place, or several
            return float("nan")
        return float(np.interp(tokens_per_round, places, self.places(), left=np.nan, right=np.nan))
