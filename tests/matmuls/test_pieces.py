"""The parts of the dispatcher one by one: copies, exactness, owners, reports."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_unitscale.capture.operators import RULES
from lightning_unitscale.functional.scale import scale_in_place
from lightning_unitscale.matmuls.calls import Call, sources_of
from lightning_unitscale.matmuls.coverage import CoverageCounter
from lightning_unitscale.matmuls.execute import Matmul, placement_of, scaled_copy
from lightning_unitscale.matmuls.measurement import FORWARD, Extent, MeasuredMatmul, Site, reading

MM = next(rule for rule in RULES if rule.operator == "mm")


@pytest.mark.parametrize("exponent", [-126, -7, 0, 5, 126])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[:, 3:11],
        lambda t: t[1:, :].t(),
        lambda t: t[:, :1].expand(-1, 7),
        lambda t: t[:, :5],
        lambda t: t.as_strided((3, 1, 4), (16, 5, 1)).transpose(0, 2),
        lambda t: t[:1].t(),
        lambda t: t.as_strided((1, 16, 1), (7, 1, 3)),
        lambda t: t.as_strided((8, 16), (2, 1)),
        lambda t: t[:0],
    ],
)
def test_scaled_copy_keeps_strides_and_alignment(view: Any, exponent: int) -> None:
    tensor = view(torch.randn(9, 16).sign())
    copy = scaled_copy(tensor, exponent)
    assert torch.equal(copy, tensor * 2.0**exponent)
    assert copy.shape == tensor.shape
    if tensor.numel() and 0 not in tensor.stride():
        assert copy.stride() == tensor.stride()
        assert (copy.data_ptr() - tensor.data_ptr()) % 64 == 0


@pytest.mark.parametrize("exponent", [-200, -126, 0, 3, 126, 200])
def test_scale_in_place_beyond_exponent_range(exponent: int) -> None:
    tensor = torch.full((3,), 2.0 ** (-exponent // 2), dtype=torch.float32)
    scale_in_place(tensor, exponent)
    assert torch.equal(tensor, torch.full((3,), 2.0 ** (exponent + -exponent // 2)))


@pytest.mark.parametrize("log2_unit", [0, -90, 7])
def test_extent_has_rms_smallest_and_largest(log2_unit: int) -> None:
    def measured(*values: float) -> tuple[float, float, float]:
        extent = Extent.of(torch.tensor(values), log2_unit)
        reading([extent])()
        assert extent.row is None
        return extent.rms, extent.smallest, extent.largest

    # Without abs=0 all such numbers are approximately equal.
    expected = tuple(x * 2.0**log2_unit for x in (5e-25 / math.sqrt(3), 3e-25, 4e-25))
    assert measured(0.0, -3e-25, 4e-25) == pytest.approx(expected, rel=1e-6, abs=0)
    assert measured(0.0, 0.0) == (0.0, math.inf, 0.0)
    for values in ((), (math.nan,), (math.inf, -math.inf)):
        rms, smallest, largest = measured(*values)
        assert math.isnan(rms) and (smallest, largest) == (math.inf, 0.0)
    rms, smallest, largest = measured(2.0, -math.inf, 0.0)
    assert math.isnan(rms) and smallest == largest == 2.0 ** (1 + log2_unit)


def _measured(
    *extents: Extent, addends: Any = (), dtype: torch.dtype = torch.float32
) -> MeasuredMatmul:
    return MeasuredMatmul(Site("x", "", ()), FORWARD, (), extents, addends, dtype, ())


def _why_inexact(*smallest: float, units: Any = (0, 0), addends: Any = ()) -> str:
    extents = [Extent(1.0, least, 1.0) for least in smallest]
    return _measured(*extents, addends=addends).why_inexact(units)


def test_inexact_powers_of_two_are_detected() -> None:
    assert _why_inexact(2.0**-60, 2.0**-60) == ""
    assert "terms below 2**-126" in _why_inexact(2.0**-60, 2.0**-70)
    assert "elements that would be below" in _why_inexact(2.0**-60, 1.0, units=(67, 0))
    tiny, huge = Extent(1.0, 2.0**-100, 1.0), Extent(1.0, 1.0, 2.0**100)
    assert "elements" in _why_inexact(1.0, 1.0, units=(20, 10), addends=(tiny,))
    assert "an addend" in _why_inexact(1.0, 1.0, units=(-20, -10), addends=(huge,))
    small = (Extent(1.0, 2.0**-60, 1.0), Extent(1.0, 2.0**-70, 1.0))
    for dtype in (torch.float16, torch.float64):
        assert _measured(*small, dtype=dtype).why_inexact((0, 0)) == ""
    assert _why_inexact(math.inf, 2.0**-70) == ""
    # FP16 loses what is small with units and without, but may not overflow with them alone.
    ordinary, large = Extent(1.0, 1.0, 1.0), Extent(1.0, 1.0, 2.0**5)
    half = _measured(ordinary, ordinary, addends=(large,), dtype=torch.float16)
    assert half.why_inexact((-4, -4)) == ""
    assert "above 2**13" in half.why_inexact((-5, -4))
    assert "above 2**13" in _measured(large, ordinary, dtype=torch.float16).why_inexact((-9, 0))
    # A million terms of 2**106 are beyond FP32.
    for exponent, reason in ((56, ""), (57, "terms above 2**106")):
        extents = (Extent(1.0, 1.0, 2.0**50), Extent(1.0, 1.0, 2.0**exponent))
        found = _measured(*extents).why_inexact((0, 0))
        assert found.startswith(reason) and bool(found) == bool(reason)


def _call(first: Tensor, second: Tensor, *, knows: bool) -> Call:
    site = Site("x", "", ("input", "other"))
    return Call(
        Matmul(MM, site, FORWARD, (0, 0), (False, False), site.operand_names, 0),
        placement_of((first, second))[0],
        [tensor.data_ptr() * knows for tensor in (first, second)],
        [tensor.requires_grad for tensor in (first, second)],
    )


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 4, 4), (4, 4, 5), (5, 4, 4), (4, 5, 4)])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("needs", [(1, 0), (0,), (1,)])
def test_sources_of_backward_matmul_operands(
    knows: bool, shape: tuple[int, int, int], turned: tuple[bool, bool], needs: tuple[int, ...]
) -> None:
    """All that autograd multiplies for ``mm``, against itself: seen from below, in its order."""
    from torch.utils._python_dispatch import TorchDispatchMode

    rows, inner, columns = shape
    first = torch.randn(inner, rows).t() if turned[0] else torch.randn(rows, inner)
    second = torch.randn(columns, inner).t() if turned[1] else torch.randn(inner, columns)
    first.requires_grad_(0 in needs)
    second.requires_grad_(1 in needs)
    gradient = torch.randn(rows, columns)
    call = _call(first, second, knows=knows)
    seen: list[tuple[Any, Any]] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if func._schema.name == "aten::mm":
                call.num_visits += 1
                known = {first.data_ptr(): 0, second.data_ptr(): 1, gradient.data_ptr(): None}
                seen.append((sources_of(MM, call, args), tuple(known[t.data_ptr()] for t in args)))
            return func(*args, **(kwargs or {}))

    result = first @ second
    with Mode():
        result.backward(gradient)
    assert len(seen) == len(needs)
    for found, expected in seen:
        assert found == expected


def test_coverage_line_and_shortfall() -> None:
    counter = CoverageCounter()
    assert counter.result().line() == "no matmul ran"
    assert counter.result().shortfall() == ""
    site_plain: dict[str, str] = {}
    counter.add("up", "units", "", 60, (site_plain, "forward"))
    counter.add("down", "format", "", 35)
    counter.add("", "plain", "a kernel of distances", 5)
    coverage = counter.result()
    assert coverage.line() == (
        "2 of 3 matmuls scaled (95 % of their FLOPs), 1 of them in a format (35 %); "
        "5 % unscaled: a kernel of distances"
    )
    assert coverage.shortfall() == "" and coverage.uncovered_modules() == ("the step itself",)
    assert "(the step itself)" in coverage.table()
    # After the step it is known whether scaling is exact.
    site_plain["forward"] = "terms below"
    assert "Unscaled matmuls are in up, the step itself" in counter.result().shortfall()
    alone = counter.result(has_units=False)
    assert alone.line().startswith("1 of 3 matmuls in a format (35 % of their FLOPs);")


def test_excluded_matmuls_are_not_a_shortfall() -> None:
    counter = CoverageCounter()
    counter.add("up", "left out", "", 60)
    counter.add("down", "format", "", 40)
    coverage = counter.result(has_units=False)
    assert coverage.shortfall() == ""
    assert coverage.line() == "1 of 2 matmuls in a format (40 % of their FLOPs)"
