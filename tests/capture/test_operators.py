"""The table of operators against torch's kernels: which arguments a call reads."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_unitscale.capture.operators import RULES, MatmulRule
from tests.helpers import assert_same_bits

_ATEN = torch.ops.aten
_RULES = {rule.operator: rule for rule in RULES}
MASKS = list(itertools.product([True, False], repeat=3))
GARBAGE = [math.nan, 1e38, 1e-38, 0.0]
CONVOLUTION = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _call(rule: MatmulRule, *others: Any, mask: Any = ()) -> tuple[Any, ...]:
    """Arguments of a rule's operator on the CPU: small tensors, and others behind them."""
    shapes: dict[str, list[tuple[int, ...]]] = {
        "mm": [(3, 4), (4, 5)],
        "bmm": [(2, 3, 4), (2, 4, 5)],
        "mv": [(3, 4), (4,)],
        "dot": [(4,), (4,)],
        "vdot": [(4,), (4,)],
        "addmm": [(3, 5), (3, 4), (4, 5)],
        "baddbmm": [(2, 3, 5), (2, 3, 4), (2, 4, 5)],
        "addbmm": [(3, 5), (2, 3, 4), (2, 4, 5)],
        "addmv": [(3,), (3, 4), (4,)],
        "convolution": [(2, 3, 6, 6), (4, 3, 3, 3), (4,)],
        "convolution_backward": [(2, 4, 4, 4), (2, 3, 6, 6), (4, 3, 3, 3)],
        "conv_tbc": [(6, 2, 3), (3, 3, 4), (4,)],
        "conv_tbc_backward": [(4, 2, 4), (6, 2, 3), (3, 3, 4), (4,)],
    }
    tensors = [randn(*shape) for shape in shapes[rule.operator]]
    rest: dict[str, tuple[Any, ...]] = {
        "convolution": CONVOLUTION[1:],
        "convolution_backward": (*CONVOLUTION, list(mask)),
        "conv_tbc": (0,),
        "conv_tbc_backward": (0,),
    }
    return (*tensors, *rest.get(rule.operator, ()), *others)


def _is_read(rule: MatmulRule, args: tuple[Any, ...], position: int, **kw: Any) -> bool:
    """Check whether the results of torch's own operator change with NaN in an argument."""
    changed = list(args)
    changed[position] = torch.full_like(args[position], math.nan)
    result = getattr(_ATEN, rule.operator)(*changed, **kw)
    results = result if isinstance(result, tuple) else (result,)
    # A library may compute two of a convolution's gradients at once.
    wanted = (True,) * len(results) if rule.mask is None else args[rule.mask]
    return any(r.isnan().any() for r, is_wanted in zip(results, wanted, strict=True) if is_wanted)


@pytest.mark.parametrize("operator", [name for name in _RULES if not name.startswith("_")])
@pytest.mark.parametrize("beta", [1, 0, 0.0])
def test_operators_read_expected_arguments(operator: str, beta: float) -> None:
    rule = _RULES[operator]
    kwargs = {"beta": beta} if rule.addends == (0,) else {}
    for mask in MASKS if rule.mask is not None else [()]:
        args = _call(rule, mask=mask)
        reading = rule.reading(args, kwargs)
        read = [position for position in rule.operands if _is_read(rule, args, position, **kwargs)]
        assert list(reading.operands) == read
        assert len(reading.sources) == (len(read) if rule.sources else 0)
        added = [at for at in rule.addends if _is_read(rule, args, at, **kwargs)]
        assert reading.addends_in(args) == added
        assert reading.multiplies(args, kwargs) == (len(read) > 1)
        assert not read or len(reading.name_in(args)[1]) == len(read)


def test_results_of_masked_operators_keep_their_units() -> None:
    rule = _RULES["convolution_backward"]
    for mask in MASKS:
        args = _call(rule, mask=mask)
        reading = rule.reading(args, {})
        scaled, units = list(args), dict(zip(rule.operands, (3, -2, 5), strict=True))
        for position in reading.operands:
            scaled[position] = args[position] * 2.0 ** -units[position]
        plain = _ATEN.convolution_backward(*args)
        exponents = [units[position] for position in reading.operands]
        # Those that a library computes without being asked too.
        for index, result in enumerate(_ATEN.convolution_backward(*scaled)):
            if result is not None:
                powers = reading.results[index]
                assert powers is not None
                total = sum(p * e for p, e in zip(powers, exponents, strict=True))
                assert_same_bits(result * 2.0**total, plain[index])


def test_empty_and_zero_alpha_matmuls_do_not_multiply() -> None:
    mm, addmm = _RULES["mm"], _RULES["addmm"]
    assert not mm.multiplies((torch.zeros(0, 3), torch.zeros(3, 4)), {})
    assert not mm.multiplies((torch.zeros(4, 0), torch.zeros(0, 4)), {})
    args = (torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2))
    assert addmm.multiplies(args, {}) and not addmm.multiplies(args, {"alpha": 0})


@pytest.mark.parametrize("end", [5, 8, 1, 0])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_rows_after_last_group_are_not_measured(end: int, garbage: float) -> None:
    rule = _RULES["_grouped_mm"]
    ends = torch.tensor([end // 2, end], dtype=torch.int32)
    rows, stack, columns = randn(8, 16), randn(2, 16, 16), randn(16, 8)
    turned = rows.t()
    for first, second, dims in (
        (rows, stack, (0, None)),
        (stack, columns, (None, 1)),
        (turned, rows, (1, 0)),
    ):
        given = []
        for tensor, dim in zip((first, second), dims, strict=True):
            given.append(tensor.clone())
            if dim is not None:
                given[-1].narrow(dim, end, 8 - end).fill_(garbage)
        for tensor, measured, dim in zip(
            (first, second), rule.measured_in((*given, ends)), dims, strict=True
        ):
            read = tensor if dim is None else tensor.narrow(dim, 0, end)
            if read.numel():
                assert set(measured.unique().tolist()) == set(read.unique().tolist())
            else:
                assert measured.isnan().all()
    assert [*rule.measured_in((rows, stack))] == [rows, stack]
