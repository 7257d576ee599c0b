"""The live sweep without a browser: in place, stopped, failed, closed; its thread never ends the process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.study import sweep, sweep_ar
from kdlab.study.live import CHECK_COLUMNS
from kdlab.study.walk import COLUMNS
from kdlab.viz import LiveSweep, figure_of, live_findings, plot_live_sweep

HOSTILE = "<script>document.title = 'owned'</script>"


class Work:
    """Turns of a sweep that come when the test lets them; `closed` says that nobody waits for more."""

    def __init__(self, field, total=6):
        self.tables = pd.concat([sweep(field, [3, 7]), sweep_ar(field)], ignore_index=True)
        self.total, self.go, self.closed = total, threading.Semaphore(0), threading.Event()

    def __iter__(self):
        try:
            for turn in range(self.total):
                while not self.go.acquire(timeout=0.01):
                    yield None
                yield self.tables[self.tables["prompt"] == turn]
        finally:
            self.closed.set()


@pytest.fixture
def work(field):
    return Work(field)


def until(truth):
    late = time.monotonic() + 20
    while not truth() and time.monotonic() < late:
        time.sleep(0.005)
    assert truth()


def test_turns_update_number_and_curve_in_place_and_print_nothing(work, capsys, monkeypatch):
    monkeypatch.setattr("kdlab.viz.widgets.live_sweep._WORDS_S", 0.05)
    live = LiveSweep(work, 6)
    image, before = live.drawing, live.drawing.png
    assert (live.state, live.result.shape) == ("ready", (0, len(COLUMNS)))
    assert live.start() is live.start()
    work.go.release()
    until(lambda: live.done == 1 and "1 of 6" in live.words.value)
    assert live.state == "running"
    assert "about" in live.words.value
    before_words = live.words.value
    until(lambda: live.words.value != before_words)  # the time goes on within a turn
    assert live.bar.value == 1
    work.go.release(5)
    table = live.wait()
    assert (live.state, live.bar.value, live.bar.bar_style) == ("done", 6, "success")
    pd.testing.assert_frame_equal(table, work.tables.sort_values("prompt", kind="stable").reset_index(drop=True))
    assert live.drawing is image
    assert image.png.startswith(b"\x89PNG")
    assert image.png != before
    assert "6 of 6 turns" in image.words
    assert live.button.disabled
    assert capsys.readouterr() == ("", "")


def test_stopped_it_keeps_whole_turns_and_its_twin_shows_them(work):
    live = LiveSweep(work, 6).start()
    work.go.release(2)
    until(lambda: live.done == 2)
    live.button.click()
    table = live.wait()
    assert work.closed.wait(20)
    assert live.state == "stopped"
    assert sorted(set(table["prompt"])) == [0, 1]
    assert table.groupby(["method", "setting"])["prompt"].nunique().tolist() == [2, 2, 2]
    assert live.static().get_title(loc="left") == "Live rounds, 2 of 6 turns"
    pd.testing.assert_frame_equal(live.wait(), table)


def test_stopped_before_the_first_turn_there_is_an_empty_table(work):
    live = LiveSweep(work, 6)
    live.stop()
    assert live.wait().empty
    assert live.state == "stopped"
    assert live.static().get_title(loc="left") == "Live rounds, 0 of 6 turns"


@pytest.mark.parametrize("error", [RuntimeError(f"CUDA out of memory. {HOSTILE}\nmore"), SystemExit(3)], ids=repr)
def test_an_error_is_shown_and_raised_again_and_what_was_there_stays(work, error, capsys):
    held = []

    def failing():
        buffer = np.zeros(10)
        held.append(weakref.ref(buffer))
        yield from ()
        yield next(iter(work))
        yield work.tables[work.tables["prompt"] == 0]
        raise error

    live = LiveSweep(failing(), 6)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            live.wait()
        assert caught.value is error
    assert (live.state, live.bar.bar_style) == ("failed", "danger")
    assert f"failed after 1 of 6 turns: {type(error).__name__}" in live.words.value
    assert "<script" not in live.words.value
    assert len(live.result) == 3
    assert held[0]() is None  # the buffers of the work are gone although the error lives
    assert capsys.readouterr() == ("", "")


def test_closed_it_ends_its_work(work):
    live = LiveSweep(work, 6).start()
    work.go.release()
    until(lambda: live.done == 1)
    live.close()
    assert work.closed.is_set()
    assert live.state == "stopped"
    assert len(live.result) == 3


def test_an_interruption_of_wait_stops_it(work):
    live = LiveSweep(work, 6)
    work.go.release()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        live.wait()
    assert work.closed.is_set()
    assert live.state == "stopped"


def test_awaited_it_lets_others_run_and_a_cancelled_task_stops_it(work):
    async def both(live):
        work.go.release(6)
        table, _ = await asyncio.gather(waiting(live), asyncio.sleep(0))
        return table

    async def waiting(live):
        return await live

    async def cancelled(live):
        task = asyncio.create_task(waiting(live))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert len(asyncio.run(both(LiveSweep(work, 6)))) == 18
    work.closed.clear()
    live = LiveSweep(work, 6)
    asyncio.run(cancelled(live))
    assert work.closed.is_set()
    assert live.state == "stopped"


@pytest.mark.parametrize("name", ["static", "_tell"])
def test_what_cannot_be_shown_fails_the_sweep_and_not_the_process(work, monkeypatch, name):
    live = LiveSweep(work, 6)
    work.go.release(6)
    monkeypatch.setattr(live, name, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        live.wait()
    assert live.state == "failed"


def test_marks_stand_on_the_predicted_curve_and_every_line_has_a_name(field, table):
    from kdlab.study import summarize

    predicted = summarize(table, num_resamples=20)
    ax = plot_live_sweep(table[table["setting"].isin([0, 3])], predicted, provenance={"pair": "toy"})
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"DDTree", "AR", "line: predicted by the recording"} <= set(names)
    assert any(name.startswith("adaptive chain") for name in names)
    assert "toy" in " ".join(text.get_text() for text in ax.texts)
    assert figure_of(plot_live_sweep(table.head(0))).axes


def test_what_differs_is_named_and_what_no_near_tie_explains_is_bold():
    rows = [("ar", 0.0, 5, 60, 60, 5, False), ("chain", 3.0, 5, 60, 30, 0, True), ("ddtree", 7.0, 5, 21, 20, 4, False)]
    checks = pd.DataFrame(rows, columns=list(CHECK_COLUMNS))
    first, far, near = live_findings(checks).split("\n")
    assert first == "- Every round of 1 of 3 methods and settings is as long as predicted, over 5 prompts."
    assert far.startswith("- chain, length 3: 0 of 5 prompts equal, 60 rounds, 30 predicted. **More than near ties")
    assert near == "- DDTree, budget 7: 4 of 5 prompts equal, 21 rounds, 20 predicted."
    assert live_findings(checks.head(1)).startswith("- Every round of every method and setting is as long as predicted")
    assert "nothing was compared" in live_findings(checks.head(0))


def test_parts_that_are_no_tables_are_refused_and_leave_a_result():
    live = LiveSweep([None, "a table"], 1)
    with pytest.raises(ArgumentError, match="parts: expected tables, and None between them, got str"):
        live.wait()
    assert "failed after 0 of 1 turns: ArgumentError: parts" in live.words.value
    assert live.result.empty


@pytest.mark.parametrize("total", [0, -1, 1.5, "6"])
def test_a_total_that_is_no_count_is_refused(total):
    with pytest.raises(ArgumentError, match="total"):
        LiveSweep([], total)


def test_a_process_that_ends_lets_the_round_end_and_does_not_crash():
    code = """
import itertools, time
from kdlab.viz import LiveSweep

def work():
    try:
        for _ in itertools.count():
            time.sleep(0.01)
            yield None
    finally:
        print("left")

LiveSweep(work(), 3).start()
time.sleep(0.1)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")
