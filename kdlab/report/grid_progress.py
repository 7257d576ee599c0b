"""What a running grid says: each point's end, and every few seconds how far it is and how long it still takes."""

import time
from collections.abc import Callable, Mapping

from kdlab.report.grid_task import PointEnd
from kdlab.report.notebook_job import HEARTBEAT_S


class GridProgress:
    """Turns ends of points into lines of progress."""

    def __init__(self, name: str, points: Mapping[str, str], done: int, say: Callable[[str], None]) -> None:
        self._name, self._points, self._say = name, points, say
        self._earlier, self._done, self._failed = done, 0, 0
        self._workers, self._places, self._seconds = 1, set[str | None](), 0.0
        self._running: dict[str, str] = {}
        self._started = self._said = time.monotonic()
        if done:
            say(f"{name}: {done} of {len(points)} points were done before")

    def workers(self, count: int) -> None:
        """Take the number of points that run side by side."""
        self._workers = count

    def running(self, point: str, line: str) -> None:
        """Take a line about a point that runs; any thread may call."""
        self._running[point] = line

    def __call__(self, end: PointEnd | None) -> None:
        """Say how a point ended; None is a moment in which nothing did."""
        now = time.monotonic()
        if end is None:
            if now - self._said >= HEARTBEAT_S:
                self._tell(now)
            return
        self._running.pop(end.name, None)
        self._done += end.status == "done"
        self._failed += end.status == "failed"
        self._seconds += end.seconds or 0.0
        self._places.add(end.place)
        seconds = "" if end.seconds is None else f" in {end.seconds:.0f} s"
        problem = f": {end.problem}" if end.problem else ""
        place = f" on {end.place}" if end.place else ""
        self._say(f"{self._points[end.name]}: {end.status}{seconds}{place}{problem}")
        self._tell(now)

    def _tell(self, now: float) -> None:
        self._said, spent, total = now, now - self._started, len(self._points)
        ended = self._done + self._failed
        left = total - self._earlier - ended
        words = [f"{self._earlier + ended} of {total} points", f"{spent:.0f} s"]
        if self._failed:
            words.insert(1, f"{self._failed} failed")
        if ended and left:
            words.append(f"about {self._left_s(ended, left, spent):.0f} s left")
        running = "; ".join(f"{self._points[name]} at {line}" for name, line in sorted(self._running.items()))
        self._say(f"{self._name}: {', '.join(words)}" + (f" ({running})" if running and left else ""))

    def _left_s(self, ended: int, left: int, spent: float) -> float:
        """Estimate the time left: every point takes the mean of those that ended, and all workers are busy."""
        workers = max(self._workers, len(self._places))  # workers may come later
        return max(self._seconds / ended * (ended + left) / min(workers, ended + left) - spent, 0.0)
