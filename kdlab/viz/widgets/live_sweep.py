"""A sweep that runs while one looks at it: a thread works, a widget shows how far it is and the curve so far."""

import asyncio
import atexit
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from html import escape
from typing import Any

import ipywidgets
import pandas as pd
from matplotlib.axes import Axes

from kdlab.checks import check_int
from kdlab.errors import ArgumentError
from kdlab.study.walk import COLUMNS
from kdlab.viz.widgets.figure_image import FigureImage
from kdlab.viz.widgets.live_sweep_figure import plot_live_sweep

_END_S = 5.0
"""How long whoever takes the widget away waits for the round that runs."""
_LOOK_S = 0.05
"""How often who awaits it looks whether it has ended."""
_WORDS_S = 1.0
"""How old the time on show may be."""
_DRAWING_SHARE = 0.1
"""Most of the time that drawing may take from the work."""


class LiveSweep(ipywidgets.VBox):
    """A sweep in progress: turns done and left, and the curve so far with its intervals, updated in place.

    The work runs in a thread of its own, which sets traits and prints nothing. It can be stopped, by the button or by
    `stop`, and what it has stays: whole turns, a table like that of a finished sweep. `await live_sweep` in a notebook
    gives that table once the sweep has ended, and lets the button through meanwhile (from ipykernel 7 on; with an older
    one interrupt the kernel, which stops the sweep as well). Papermill and scripts, where nobody looks, run it to its
    end by the same words or by `wait`, and `static` draws what the widget would show.

    Args:
        parts: what does the work as it is iterated: it yields the rows of a turn, or None at a moment at which it may
            be stopped. `kdlab.study.sweep_live` is one.
        total: turns that there will be.
        predicted: from `kdlab.study.summarize`: what a recording predicts, drawn as lines behind the marks.
        provenance: adds the line that says on what the rounds ran.

    Attributes:
        state: "ready", "running", "done", "stopped" or "failed".
        done, total: turns.
        button: stops the sweep.
        bar, words: how far it is, in both forms.
        drawing: FigureImage, the curve so far.

    Raises:
        ArgumentError: `total` is no whole number of at least 1.
    """

    _thread: threading.Thread | None = None

    def __init__(
        self, parts: Iterable[pd.DataFrame | None], total: int, *, predicted: pd.DataFrame | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.total, self.done, self.state = check_int("total", total, minimum=1), 0, "ready"
        self._parts, self._predicted, self._provenance = parts, predicted, provenance
        self._turns: list[pd.DataFrame] = []
        self._error: BaseException | None = None
        self._asked, self._ended, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._begin = self._end = self._next_drawing = self._next_words = 0.0
        self.button = ipywidgets.Button(description="Stop", tooltip="End after the current round; keep what is there")
        self.bar = ipywidgets.IntProgress(0, 0, total, layout={"width": "16em"})
        self.words, self.drawing = ipywidgets.HTML(), FigureImage()
        super().__init__([ipywidgets.HBox([self.button, self.bar, self.words]), self.drawing])
        self.button.on_click(lambda button: self.stop())
        self._tell()
        self._draw()

    @property
    def result(self) -> pd.DataFrame:
        """The rows of the turns that are whole, of any number of them a table for `kdlab.study.summarize`."""
        turns = list(self._turns)
        return pd.concat(turns, ignore_index=True) if turns else pd.DataFrame(columns=list(COLUMNS))

    def start(self) -> "LiveSweep":
        """Begin to work, unless that was done before; returns the widget."""
        with self._lock:
            if self._thread is None:
                self._begin = time.monotonic()
                # A kernel that shuts down does not wait for it, but lets a round end: torch may not be cut off in one.
                self._thread = threading.Thread(target=self._work, name="LiveSweep", daemon=True)
                atexit.register(self._leave)
                self._thread.start()
        return self

    def stop(self) -> None:
        """Ask the sweep to end after the current round; returns at once."""
        self._asked.set()
        self.button.disabled = True

    def __await__(self) -> Generator[Any, None, pd.DataFrame]:
        """As `wait`, but the caller's event loop goes on: a kernel hears the button."""
        self.start()
        try:
            while not self._ended.is_set():
                yield from asyncio.sleep(_LOOK_S).__await__()
        except BaseException:  # an interruption, or a task that was cancelled
            self._leave()
            raise
        return self.wait()

    def wait(self) -> pd.DataFrame:
        """Work to the end, or until it is stopped, and return the result; an interruption stops it.

        Raises:
            Exception: what went wrong in the work; `result` still has the turns before.
        """
        self.start()
        try:
            self._ended.wait()  # an interrupted `Thread.join` of Python 3.11 takes the thread for gone
        except KeyboardInterrupt:
            self._leave()
            raise
        if self._error is not None:
            raise self._error
        return self.result

    def static(self, ax: Axes | None = None, *, provenance: Mapping[str, Any] | None = None) -> Axes:
        """Return the static twin: the curve as it is now.

        Args:
            ax: where to draw; a new figure when None.
            provenance: adds the line that says on what the rounds ran; None takes the widget's.
        """
        facts = self._provenance if provenance is None else provenance
        return plot_live_sweep(self.result, self._predicted, ax, title=self._title(), provenance=facts)

    def close(self) -> None:
        """Take the widget away and end its work."""
        self._leave()
        for part in self.children:
            part.close()
        super().close()

    def _leave(self) -> None:
        if self._thread is not None:
            self.stop()
            self._ended.wait(_END_S)

    def _work(self) -> None:
        self.state = "running"
        for step in (self._tell, self._consume, self._draw):  # a sweep that failed is drawn, too
            self._try(step)
        self._end = time.monotonic()
        self.button.disabled = True
        self._try(self._tell)
        atexit.unregister(self._leave)
        self._ended.set()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:  # nobody else would ever see it
            # The frames of the work hold its tensors: after an out-of-memory error nothing else would run.
            traceback.clear_frames(error.__traceback__)
            self._error, self.state = self._error or error, "failed"

    def _consume(self) -> None:
        """Take the parts until they end or somebody stops them."""
        parts = iter(self._parts)
        self._parts = ()  # the models' buffers go with the last of the parts
        try:
            for part in parts:
                if part is not None:
                    self._take(part)
                elif time.monotonic() >= self._next_words:
                    self._tell()  # a turn may be long
                if self._asked.is_set():
                    break
            self.state = "done" if self.done >= self.total or not self._asked.is_set() else "stopped"
        finally:
            getattr(parts, "close", lambda: None)()

    def _take(self, turn: pd.DataFrame) -> None:
        if not isinstance(turn, pd.DataFrame):
            raise ArgumentError("parts", "tables, and None between them", type(turn).__name__)
        self._turns.append(turn)
        self.done = len(self._turns)
        self._tell()
        if time.monotonic() >= self._next_drawing:
            self._draw()

    def _draw(self) -> None:
        begin = time.monotonic()
        self.drawing.show(self.static(), f"{self._title()}, tokens per round against rows")
        spent = time.monotonic() - begin
        self._next_drawing = time.monotonic() + spent / _DRAWING_SHARE

    def _title(self) -> str:
        return f"Live rounds, {self.done} of {self.total} turns"

    def _tell(self) -> None:
        self.bar.value = min(self.done, self.total)
        self.bar.bar_style = {"done": "success", "stopped": "warning", "failed": "danger"}.get(self.state, "")
        self.words.value = f"<span role='status'>{escape(self._sentence())}</span>"
        self._next_words = time.monotonic() + _WORDS_S

    def _sentence(self) -> str:
        spent = (self._end or time.monotonic()) - self._begin
        turns = f"{self.done} of {self.total} turns"
        if self.state == "ready":
            return f"ready: {self.total} turns"
        if self.state == "failed":
            lines = str(self._error).strip().splitlines() or [""]
            return f"failed after {turns}: {type(self._error).__name__}: {lines[0]}"
        if self.state == "running":
            left = f", about {spent / self.done * (self.total - self.done):.0f} s left" if self.done else ""
            return f"{turns}, {spent:.0f} s{left}"
        return f"{self.state}: {turns}, {spent:.0f} s"
