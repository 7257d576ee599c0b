"""What is remembered by the layouts of tensors: told apart where a check could tell them apart; no GPU needed."""

from dataclasses import dataclass

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ShapeError
from kdlab.kernels import draft_attention, moe_int4
from kdlab.kernels.jit.layouts import by_layout
from kdlab.kernels.skinny_linear import skinny_linear
from tests.kernels import moe_cases, test_draft_attention
from tests.kernels.test_draft_attention import Case, fake


@dataclass(frozen=True)
class Two:
    """Tensors that travel together."""

    first: torch.Tensor
    second: torch.Tensor


@pytest.fixture
def asked():
    """A remembered function and the list of calls that reached it."""
    calls = []

    @by_layout
    def answer(x, other=None, *words):
        calls.append(words)
        if x.shape[0] == 13:
            raise ShapeError("x", "another number of rows", 13)
        return len(calls)

    return answer, calls


def on_gpu(*shape, **options):
    return torch.empty(*shape, device="cuda:0", **options)


def test_equal_layouts_are_asked_once(asked):
    answer, calls = asked
    with FakeTensorMode():
        assert answer(on_gpu(3, 4), None, "auto", 1) == answer(on_gpu(3, 4), None, "auto", 1) == 1
        assert answer(on_gpu(3, 4), Two(on_gpu(2), on_gpu(2))) == answer(on_gpu(3, 4), Two(on_gpu(2), on_gpu(2))) == 2
    assert len(calls) == 2


def test_whatever_differs_is_asked_anew(asked):
    answer, calls = asked
    with FakeTensorMode():
        base = on_gpu(8, 16)
        different = [
            (base,),
            (base, None),
            (on_gpu(8, 17),),
            (on_gpu(16, 8).mT,),
            (torch.as_strided(base, (4, 16), (16, 1)),),
            (torch.as_strided(base, (4, 16), (16, 1), 16),),
            (on_gpu(8, 16, dtype=torch.float16),),
            (torch.empty(8, 16, device="cuda:1"),),
            (base, base),
            (base, None, 1),
            (base, None, 1.0),
            (base, None, True),
            (base, None, "1"),
            (base, Two(base, base)),
            (base, Two(base, on_gpu(8, 17))),
        ]
        for _ in range(2):
            answers = [answer(*arguments) for arguments in different]
    assert answers == list(range(1, len(different) + 1))
    assert len(calls) == len(different)


def test_errors_are_raised_every_time_and_the_cpu_is_asked_every_time(asked):
    answer, calls = asked
    with FakeTensorMode():
        for _ in range(2):
            for more in ([], [None, []]):  # the second has no hash
                with pytest.raises(ShapeError, match="another number of rows") as caught:
                    answer(on_gpu(13, 1), *more)
                assert caught.value.__context__ is None, "the look-up shows in the error"
            answer(on_gpu(3, 1), None, [])
    for _ in range(2):
        answer(torch.empty(3, 4))
        with FakeTensorMode():
            answer(on_gpu(3, 4), torch.empty(1))
            answer(on_gpu(3, 4), Two(on_gpu(1), torch.empty(1)))
    assert len(calls) == 12


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_tensor_without_strides_is_refused_as_on_the_cpu():
    sparse = torch.eye(256, dtype=torch.bfloat16).to_sparse_csr()
    with FakeTensorMode():
        x = on_gpu(3, 256, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"weight: expected a dense tensor \[N, 256\], got torch.sparse_csr"):
            skinny_linear(x, sparse)


def test_what_is_remembered_does_not_grow_for_ever(asked, monkeypatch):
    answer, calls = asked
    monkeypatch.setattr("kdlab.kernels.jit.layouts._MAX_ANSWERS", 2)
    with FakeTensorMode():
        for _ in range(2):
            for rows in (1, 2, 3):
                answer(on_gpu(rows))
    assert len(calls) > 3


def test_the_drafts_attention_checks_equal_layouts_once(monkeypatch):
    checked, check = [], draft_attention._check
    monkeypatch.setattr(draft_attention, "_check", lambda *tensors: (checked.append(tensors), check(*tensors)))
    made = test_draft_attention.new_case((9, 3), heads=8, kv_heads=2, dtype=torch.bfloat16, capacity=77)
    with FakeTensorMode():
        for window, times in ((None, 1), (None, 1), (5, 2), (None, 2)):
            case = Case(*map(fake, made.tensors()), window)  # other tensors of the same layout
            assert case.run("cuda").shape == made.q.shape
            assert len(checked) == times


def test_experts_are_checked_once_for_equal_layouts(monkeypatch):
    checked, check = [], moe_int4.check_moe
    monkeypatch.setattr(moe_int4, "check_moe", lambda *tensors: (checked.append(tensors), check(*tensors)))
    with FakeTensorMode():
        for rows, shared, times in ((3, False, 1), (3, False, 1), (3, True, 2), (4, True, 3), (3, False, 3)):
            case = {name: moved(value) for name, value in moe_cases.new_case(rows, shared=shared).items()}
            assert moe_int4.moe_int4(**case, impl="cuda").shape == case["x"].shape
            assert len(checked) == times
            with pytest.raises(ShapeError, match="weights"):
                moe_int4.moe_int4(**(case | {"weights": case["weights"].int()}), impl="cuda")
            checked.pop()


def moved(value):
    """A tensor, or a dataclass of them, on a made-up GPU."""
    names = getattr(value, "__dataclass_fields__", None)
    if names is None:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
    return type(value)(*(moved(getattr(value, name)) for name in names))
