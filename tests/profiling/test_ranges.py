"""NVTX ranges: what is pushed for stages and spans, which ranges are open where, and names as tables have them."""

import sys

import pytest

from kdlab.errors import UnsupportedDevice
from kdlab.kernels.stage import span, stage
from kdlab.profiling import nvtx_ranges
from kdlab.profiling.ranges import Range, open_ranges, place_of
from kdlab.profiling.work import kernel_name, triple


class Domain:
    """A domain of NVTX that keeps what is pushed and popped."""

    def __init__(self):
        self.log = []

    def get_event_attributes(self, message):
        return message

    def push_range(self, attributes):
        self.log.append(attributes)

    def pop_range(self):
        self.log.append("pop")


@pytest.fixture
def domain(monkeypatch):
    found = Domain()
    module = type(sys)("nvtx")
    module.get_domain = lambda name: found if name == "kdlab" else None
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return found


def a_round():
    with span("round"), span("layer", 2), stage("attention"):
        pass


def test_stages_and_spans_are_pushed_and_layers_when_asked_for(domain):
    with nvtx_ranges():
        a_round()
    assert domain.log == ["round", "attention", "pop", "pop"]
    domain.log.clear()
    with nvtx_ranges(layers=True):
        a_round()
    assert domain.log == ["round", "layer 2", "attention", "pop", "pop", "pop"]
    domain.log.clear()
    a_round()
    assert domain.log == []


def test_a_range_ends_with_an_error_inside(domain):
    with pytest.raises(ValueError, match="inside"), nvtx_ranges(), stage("attention"):
        raise ValueError("inside")
    assert domain.log == ["attention", "pop"]


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(UnsupportedDevice, match="pip install nvtx"), nvtx_ranges():
        pass


def test_the_real_package_takes_our_ranges():
    pytest.importorskip("nvtx")
    with nvtx_ranges(layers=True):
        a_round()


def test_open_ranges_are_those_of_the_thread_at_the_time():
    ranges = [Range(1, 0.0, 10.0, "round"), Range(1, 2.0, 4.0, "attention"), Range(1, 4.0, 6.0, "o_proj"),
              Range(2, 0.0, 10.0, "other")]  # fmt: skip
    moments = [(1, 5.0), (1, 3.0), (1, 4.0), (2, 3.0), (3, 3.0), (1, 10.0)]
    assert open_ranges(ranges, moments) == [
        ["round", "o_proj"], ["round", "attention"], ["round", "o_proj"], ["other"], [], [],
    ]  # fmt: skip


def test_places_follow_from_the_open_ranges():
    assert place_of(["profiled", "case 0", "round", "layer 12", "o_proj"]) == {"stage": "o_proj", "layer": 12}
    assert place_of(["prefill"]) == {"stage": "", "phase": "prefill"}
    assert place_of([]) == {"stage": ""}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("verify_merge", "verify_merge"),
        ("void at::native::(anonymous namespace)::fill<at::Half, (int)4>(int, at::Half*)", "at::native::fill"),
        ("void at::vectorized<8, at::<unnamed>::f(at::Scalar)::[lambda() (instance 1)]>(int)", "at::vectorized"),
        ("void at::<unnamed>::fill<4>(int)", "at::fill"),
        ("nvjet_tst_128x8_TNT", "nvjet_tst_128x8_TNT"),
        ("void f<g<int>(h<2>)>(float *)", "f"),
        ("", ""),
    ],
)
def test_kernels_are_named_without_arguments(text, name):
    assert kernel_name(text) == name


def test_sizes_are_read_from_lists_and_texts():
    assert triple([264, 1, 1]) == triple("(264, 1, 1)") == "264, 1, 1"
    assert triple(None) is triple("(2, 1)") is None
