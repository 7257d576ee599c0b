"""Captions: short names, and line breaks that leave no commit alone."""

import pytest

from kdlab.viz import caption
from kdlab.viz.theme import add_caption, new_axes

PROVENANCE = {
    "device": "cpu", "cpu": "Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", "threads": 1, "pair": "bundled",
    "dtype": "torch.float32", "torch": "2.13.0+cpu", "git_commit": "0123456789ab",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Intel(R) Xeon(R) Processor", "Intel Xeon"),
        ("Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", "Intel Xeon Gold 6230"),
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654"),
        ("Apple M2", "Apple M2"),
    ],
)
def test_processors_are_named_shortly(name, short):
    assert f"cpu ({short}, 1 thread)" in caption(PROVENANCE | {"cpu": name})


@pytest.mark.parametrize("width", [2.0, 3.0, 4.0, 4.6, 5.0, 6.0, 7.0, 9.0])
def test_captions_break_between_parts_and_never_leave_the_commit_alone(width):
    lines = add_caption(new_axes(None, (width, 3.0)), PROVENANCE).get_text().split("\n")
    assert " · ".join(lines) == caption(PROVENANCE)
    assert any(line.endswith("commit 012345678") and line != "commit 012345678" for line in lines)


def test_a_part_longer_than_the_line_is_wrapped_itself():
    text = add_caption(new_axes(None, (3.0, 3.0)), PROVENANCE, ["a note " * 20]).get_text()
    assert max(map(len, text.split("\n"))) <= 60
