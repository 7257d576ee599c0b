"""The lines about reading weights: none for small checkpoints, now and then and at the end for large ones."""

from kdlab.cli.output import Reading
from kdlab.model.reading import ReadProgress


def lines(capsys, *reports):
    line = Reading(every_s=2.0)
    for name, done, seconds in reports:
        line(ReadProgress(name, done << 30, 8 << 30, seconds))
    return capsys.readouterr().err.splitlines()


def test_a_small_checkpoint_is_read_in_silence(capsys):
    assert lines(capsys, ("a", 4, 0.1), ("a", 8, 0.2)) == []


def test_a_large_one_is_not(capsys):
    steps = [("a", 1, 1.0), ("a", 2, 2.5), ("a", 3, 3.0), ("a", 6, 5.0), ("a", 8, 5.5), ("b", 8, 0.1)]
    assert lines(capsys, *steps) == [
        "reading a: 2.00 of 8.00 GiB, 0.86 GB/s",
        "reading a: 6.00 of 8.00 GiB, 1.29 GB/s",
        "reading a: 8.00 of 8.00 GiB, 1.56 GB/s",
    ]
