"""Work beside the current stream: in what order the two read and write, eagerly and as branches of a graph."""

import threading

import pytest
import torch

from kdlab.kernels.capture import capture
from kdlab.kernels.side_by_side import side_by_side

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SLOW = 2_000_000  # clocks, about a millisecond: whoever does not wait is early; ahead of the fork twice as long


@pytest.fixture
def cells():
    return torch.zeros(3, device=DEVICE)


def run(cells, fault=""):
    """Write 1 on the current stream, twice of that aside, one more beside it, then add all up.

    Args:
        cells: [3] zeros; the sum of all is left in the first.
        fault: "no fork" or "no join", which `side_by_side` is there to prevent.
    """
    first, second, third = cells.split(1)
    cells.zero_()
    torch.cuda._sleep(2 * SLOW)
    first.fill_(1)

    def work():
        torch.mul(first, 2, out=second)

    if fault:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream(DEVICE)
        if fault == "no join":
            side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW)
            work()
        torch.add(first, 1, out=third)
        if fault == "no fork":
            main.wait_stream(side)
    else:
        with side_by_side(DEVICE) as aside:
            with aside:
                torch.cuda._sleep(SLOW)
                work()
            torch.add(first, 1, out=third)
    first.add_(second).add_(third)


def test_both_see_what_was_before_and_are_seen_behind(cells):
    run(cells)
    assert cells.tolist() == [5, 2, 2]


@pytest.mark.parametrize("fault", ["no fork", "no join"])
def test_what_is_not_in_order_is_seen(cells, fault):
    torch.cuda.synchronize()
    run(cells, fault)
    torch.cuda.synchronize()
    assert cells[0].item() != 5  # what was read too early is 0


def test_a_capture_has_both_in_one_graph(cells):
    graph = capture([lambda: run(cells)])
    for _ in range(2):
        cells.fill_(7)
        graph.replay()
        assert cells.tolist() == [5, 2, 2]


def test_any_stream_may_be_the_current_one(cells):
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
    mine = [torch.zeros_like(cells) for _ in streams]
    torch.cuda.synchronize()
    for stream, its in zip(streams, mine, strict=True):
        with torch.cuda.stream(stream):
            run(its)
    torch.cuda.synchronize()
    assert [its.tolist() for its in mine] == [[5, 2, 2]] * 2


def fill_and_fail(cells):
    with side_by_side(DEVICE) as aside:
        with aside:
            torch.cuda._sleep(SLOW)
            cells.fill_(3)
        raise ValueError("inside")


def test_an_error_leaves_the_streams_joined(cells):
    with pytest.raises(ValueError, match="inside"):
        fill_and_fail(cells)
    assert cells.tolist() == [3, 3, 3]


def test_a_capture_leaves_other_threads_alone(cells):
    """Work of another thread beside its own stream is no part of this one's graph."""
    other, failed = torch.zeros_like(cells), []

    def elsewhere():
        try:
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                run(other)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)

    def call():
        run(cells)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    graph = capture([call])
    assert failed == []
    assert other.tolist() == [5, 2, 2]
    other.zero_()
    graph.replay()
    assert cells.tolist() == [5, 2, 2]
    assert other.tolist() == [0, 0, 0]
