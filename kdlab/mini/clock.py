"""How far a training run is: by its share of a time budget, or of a number of steps."""

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Progress of a run that may be resumed; `spent_s` is what earlier runs took.

    With `steps` the learning rate depends on the step alone and a run repeats exactly; with `minutes` it ends in time
    on any machine.
    """

    minutes: float
    steps: int | None = None
    spent_s: float = 0.0
    _begun: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, earlier runs included."""
        return self.spent_s + time.monotonic() - self._begun

    def fraction(self, step: int) -> float:
        """Return the share of the run that is done before 0-based `step`; 1 or more ends it."""
        return step / self.steps if self.steps is not None else self.elapsed_s / (60 * self.minutes)


_WARM_UP_STEPS = 200


def learning_rate(fraction: float, step: int, peak: float, *, floor: float = 0.02) -> float:
    """Return the rate of 0-based `step` at `fraction` of the run: up, level, then down in a line from 40 % on.

    The way up counts steps, as compiling takes a share of the time before the first one. `floor` is the share of the
    peak that is left at the end.
    """
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
    if fraction < 0.4:
        return peak * warm
    return peak * warm * max(floor, 1 - (1 - floor) * (fraction - 0.4) / 0.6)
