"""How a kernel is judged: per row against float64, on outputs that stand between poisoned neighbours.

A whole-tensor similarity lets a zeroed tile or one wrong row through, so each row has to pass alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps

import pytest
import torch
from torch import Tensor

_GUARD_BYTES = 4096  # a multiple of every alignment that kernels ask for
_GUARD = 0xA5
_UNWRITTEN = 0xFF  # NaN in every float dtype, -1 in signed integers


def assert_within_budget(out: Tensor, exact: Tensor, plain: Tensor, what: str = "out") -> None:
    """Fail unless every row of `out` is as near to `exact` as twice plain torch plus one rounding.

    Per row (last axis): ||out - exact|| <= 2 (||plain - exact|| + r ||exact||), r the unit roundoff of out's dtype.
    Where `exact` is infinite or NaN, `out` has to be the same; elsewhere it has to be finite.

    Args:
        out: [..., n] float, of the kernel.
        exact: [..., n] float64, of the reference on the same inputs in float64.
        plain: [..., n] float, of the reference in the kernel's dtype.
        what: name of the output in the message.
    """
    assert exact.dtype == torch.float64, f"{what}: exact must be float64, got {exact.dtype}"
    assert out.shape == exact.shape == plain.shape, f"{what}: {out.shape}, {exact.shape}, {plain.shape}"
    rounding = torch.finfo(out.dtype).eps / 2
    exact, ours, theirs = (t.detach().cpu().double() for t in (exact, out, plain))
    _assert_same_specials(ours, exact, what)
    known = exact.isfinite()
    exact, ours, theirs = (torch.where(known, t, 0.0) for t in (exact, ours, theirs))
    error = torch.linalg.vector_norm(ours - exact, dim=-1)
    limit = torch.linalg.vector_norm((theirs - exact).nan_to_num(), dim=-1)
    limit = 2 * (limit + rounding * torch.linalg.vector_norm(exact, dim=-1))
    over = (error > limit).nonzero()
    if len(over):
        first = tuple(over[0].tolist())
        raise AssertionError(
            f"{what}: {len(over)} of {error.numel()} rows over the budget, first row {first}:"
            f" error {error[first].item():.3e}, limit {limit[first].item():.3e},"
            f" worst ratio {(error / limit).nan_to_num(posinf=torch.inf).max().item():.3g}"
        )


def _assert_same_specials(ours: Tensor, exact: Tensor, what: str) -> None:
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differ = (test(ours) != test(exact)).nonzero()
        if len(differ):
            where = tuple(differ[0].tolist())
            got, want = ours[where].item(), exact[where].item()
            raise AssertionError(f"{what}: {name} at {len(differ)} wrong places, first {where}: {got}, not {want}")


def budget_share(out: Tensor, exact: Tensor, plain: Tensor) -> float:
    """Return the largest error of a row over its budget (1.0 is just allowed); for tables, not for tests."""
    rounding = torch.finfo(out.dtype).eps / 2
    exact, ours, theirs = (t.detach().cpu().double() for t in (exact, out, plain))
    exact, ours, theirs = (torch.where(exact.isfinite(), t, 0.0) for t in (exact, ours, theirs))
    limit = (theirs - exact).norm(dim=-1) + rounding * exact.norm(dim=-1)
    return ((ours - exact).norm(dim=-1) / (2 * limit)).nan_to_num(nan=0.0).max().item()


def broken_twins(out: Tensor, tile: int = 16) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of `out` [..., n], each with one fault in its largest rows: zeroed tile, NaN, another row's values.

    Args:
        out: a right result with at least two different non-zero rows.
        tile: rows and columns of the zeroed tile.
    """
    rows = out.detach().flatten(0, -2)
    norms = rows.double().nan_to_num(0, 0, 0).norm(dim=-1)
    worst = int(norms.argmax())
    zeroed, unknown, swapped = rows.clone(), rows.clone(), rows.clone()
    zeroed[worst : worst + tile, :tile] = 0
    unknown[worst, -1] = torch.nan
    others = (rows != rows[worst]).any(dim=-1).nonzero().flatten()
    swapped[worst] = rows[int(others[-1])]
    for name, twin in (("zeroed tile", zeroed), ("NaN", unknown), ("wrong row", swapped)):
        yield name, twin.view(out.shape)


def assert_faults_are_found(out: Tensor, exact: Tensor, plain: Tensor, what: str = "out", tile: int = 16) -> None:
    """Fail unless `assert_within_budget` rejects every broken twin of `out`; arguments as there."""
    for name, twin in broken_twins(out, tile):
        try:
            assert_within_budget(twin, exact, plain, what)
        except AssertionError:
            continue
        pytest.fail(f"{what}: the comparison accepts a {name}")


def canary(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Callable[[], None]]:
    """Make a tensor in the middle of a poisoned buffer.

    The tensor itself holds NaN (-1 in integers, False in bools), so that an element nobody writes shows.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: of the tensor.

    Returns:
        The tensor, aligned as torch's own are, and a function that fails when a byte before or behind it has changed.
    """
    size = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
    padded = -(-size // 256) * 256  # the guard behind starts at the very next byte, the buffer's end stays aligned
    buffer = _EMPTY(padded + 2 * _GUARD_BYTES, dtype=torch.uint8, device=device).fill_(_GUARD)
    inside = buffer[_GUARD_BYTES : _GUARD_BYTES + size]
    inside.fill_(0 if dtype == torch.bool else _UNWRITTEN)

    def check() -> None:
        for name, guard in (("before", buffer[:_GUARD_BYTES]), ("behind", buffer[_GUARD_BYTES + size :])):
            changed = (guard != _GUARD).nonzero().flatten()
            if len(changed):
                first = int(changed[0]) if name == "behind" else int(changed[-1]) - _GUARD_BYTES
                pytest.fail(f"{len(changed)} bytes {name} the {dtype} tensor {list(shape)} changed, nearest at {first}")

    return inside.view(dtype).view(tuple(shape)), check


@contextmanager
def guarded_allocations() -> Iterator[Callable[[], None]]:
    """Give every tensor that `torch.empty`, `empty_like`, `zeros`, `full` and `new_empty` make its canaries.

    For ops that allocate their own outputs and workspace: run the op inside, then call what is yielded.

    Yields:
        A function that fails when a neighbour byte of any such tensor has changed, or when there was none.
    """
    checks: list[Callable[[], None]] = []

    def guard(name: str, maker: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(maker)
        def make(*args: object, **kwargs: object) -> Tensor:
            plain = maker(*args, **kwargs)
            if plain.layout is not torch.strided or not plain.is_contiguous() or plain.device.type == "meta":
                return plain
            guarded, check = canary(plain.shape, plain.dtype, plain.device)
            checks.append(check)
            return guarded if name.endswith(("empty", "empty_like")) else guarded.copy_(plain)

        return make

    def check_all() -> None:
        assert checks, "nothing was allocated through torch"
        for check in checks:
            check()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "zeros", "full"):
            patch.setattr(torch, name, guard(name, getattr(torch, name)))
        patch.setattr(torch.Tensor, "new_empty", guard("new_empty", torch.Tensor.new_empty))
        yield check_all


_EMPTY = torch.empty  # canaries are made while `torch.empty` is patched
