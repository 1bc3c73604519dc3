"""Every call of every matmul is found, with the right operands."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.capture.decompose import attention_matmul
from lightning_unitscale.capture.graph_matmuls import matmul_of
from lightning_unitscale.capture.graph_nodes import argument_at
from tests.helpers import captured

# function of (a, b[, c]); shapes; operands by role as letters; addends by role as letters
_A, _B, _C = "abc"
_MM = ((4, 8), (8, 3))
_BMM = ((2, 4, 8), (2, 8, 3))
_Form = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], dict[str, str], str]
_FORMS: dict[str, _Form] = {
    "linear": (F.linear, ((5, 8), (6, 8)), {"input": _A, "weight": _B}, ""),
    "linear_bias": (F.linear, ((5, 8), (6, 8), (6,)), {"input": _A, "weight": _B}, _C),
    "linear_keywords": (
        lambda a, b, c: F.linear(bias=c, weight=b, input=a),
        ((5, 8), (6, 8), (6,)),
        {"input": _A, "weight": _B},
        _C,
    ),
    "matmul": (torch.matmul, _MM, {"input": _A, "other": _B}, ""),
    "matmul_operator": (operator.matmul, _MM, {"input": _A, "other": _B}, ""),
    "matmul_in_place": (operator.imatmul, _MM, {"input": _A, "other": _B}, ""),
    "matmul_method": (lambda a, b: a.matmul(b), _MM, {"input": _A, "other": _B}, ""),
    "matmul_dunder": (lambda a, b: a.__matmul__(b), _MM, {"input": _A, "other": _B}, ""),
    "matmul_keyword": (
        lambda a, b: torch.matmul(other=b, input=a),
        _MM,
        {"input": _A, "other": _B},
        "",
    ),
    "linalg_matmul": (torch.linalg.matmul, _MM, {"input": _A, "other": _B}, ""),
    "mm": (torch.mm, _MM, {"input": _A, "mat2": _B}, ""),
    "mm_method": (lambda a, b: a.mm(mat2=b), _MM, {"input": _A, "mat2": _B}, ""),
    "bmm": (torch.bmm, _BMM, {"input": _A, "mat2": _B}, ""),
    "mv": (lambda a, b: a.mv(b), ((4, 8), (8,)), {"input": _A, "vec": _B}, ""),
    "dot": (lambda a, b: a.dot(b), ((8,), (8,)), {"input": _A, "tensor": _B}, ""),
    "inner": (torch.inner, ((4, 8), (3, 8)), {"input": _A, "other": _B}, ""),
    "addmm": (
        lambda a, b, c: torch.addmm(c, a, b, alpha=2),
        (*_MM, (4, 3)),
        {"mat1": _A, "mat2": _B},
        _C,
    ),
    "addmm_method": (
        lambda a, b, c: c.addmm(a, mat2=b),
        (*_MM, (4, 3)),
        {"mat1": _A, "mat2": _B},
        _C,
    ),
    "addmm_keywords": (
        lambda a, b, c: torch.addmm(input=c, mat1=a, mat2=b),
        (*_MM, (3,)),
        {"mat1": _A, "mat2": _B},
        _C,
    ),
    "baddbmm": (
        lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5),
        (*_BMM, (2, 4, 3)),
        {"batch1": _A, "batch2": _B},
        _C,
    ),
    "addbmm": (
        lambda a, b, c: c.addbmm(a, b),
        (*_BMM, (4, 3)),
        {"batch1": _A, "batch2": _B},
        _C,
    ),
    "addmv": (
        lambda a, b, c: torch.addmv(c, a, b),
        ((4, 8), (8,), (4,)),
        {"mat": _A, "vec": _B},
        _C,
    ),
    "operator": (lambda a, b: torch.ops.aten.mm(a, b), _MM, {"input": _A, "mat2": _B}, ""),
    "overload": (lambda a, b: torch.ops.aten.mm.default(a, b), _MM, {"input": _A, "mat2": _B}, ""),
    "einsum": (
        lambda a, b: torch.einsum("ij,jk", a, b),
        _MM,
        {"operand0": _A, "operand1": _B},
        "",
    ),
    "einsum_list": (
        lambda a, b: torch.einsum("ij,jk", [a, b]),
        _MM,
        {"operand0": _A, "operand1": _B},
        "",
    ),
    "einsum_three": (
        lambda a, b, c: torch.einsum("ij,jk,kl", a, b, c),
        (*_MM, (3, 2)),
        {"operand0": _A, "operand1": _B, "operand2": _C},
        "",
    ),
    "multi_dot": (
        lambda a, b, c: torch.linalg.multi_dot([a, b, c]),
        (*_MM, (3, 2)),
        {"operand0": _A, "operand1": _B, "operand2": _C},
        "",
    ),
    "bilinear": (
        lambda a, b, c: F.bilinear(a, b, weight=c),
        ((5, 4), (5, 6), (3, 4, 6)),
        {"input1": _A, "input2": _B, "weight": _C},
        "",
    ),
    "conv1d": (F.conv1d, ((2, 3, 9), (4, 3, 3), (4,)), {"input": _A, "weight": _B}, _C),
    "conv2d_keywords": (
        lambda a, b, c: F.conv2d(a, weight=b, bias=c, padding="same"),
        ((2, 3, 5, 5), (4, 3, 3, 3), (4,)),
        {"input": _A, "weight": _B},
        _C,
    ),
    "conv3d": (F.conv3d, ((1, 2, 3, 3, 3), (4, 2, 2, 2, 2)), {"input": _A, "weight": _B}, ""),
    "conv_transpose1d": (
        torch.conv_transpose1d,
        ((2, 3, 9), (3, 4, 3)),
        {"input": _A, "weight": _B},
        "",
    ),
    "conv_transpose2d": (
        F.conv_transpose2d,
        ((2, 3, 5, 5), (3, 4, 3, 3), (4,)),
        {"input": _A, "weight": _B},
        _C,
    ),
    "conv_transpose3d": (
        F.conv_transpose3d,
        ((1, 2, 3, 3, 3), (2, 4, 2, 2, 2)),
        {"input": _A, "weight": _B},
        "",
    ),
    "conv_tbc": (
        lambda a, b, c: torch.conv_tbc(a, b, c),
        ((7, 2, 4), (3, 4, 5), (5,)),
        {"input": _A, "weight": _B},
        _C,
    ),
    "attention_matmul": (attention_matmul, _MM, {"input": _A, "other": _B}, ""),
    "attention": (
        lambda a, b, c: F.scaled_dot_product_attention(a, value=c, key=b),
        ((1, 2, 5, 4),) * 3,
        {"query": _A, "key": _B, "value": _C},
        "",
    ),
}  # fmt: skip


def _matmuls(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    graph = captured(function, *inputs).graph
    return [one for one in map(matmul_of, graph.nodes) if one is not None]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", _FORMS)
def test_every_call_form_is_found_with_its_operands(name: str) -> None:
    function, shapes, operands, addend = _FORMS[name]
    inputs = [torch.randn(*shape) for shape in shapes]

    # Fixed names of the arguments, so that the name of a placeholder identifies it.
    if len(inputs) == 2:

        def step(a: Tensor, b: Tensor) -> Tensor:
            return function(a.neg(), b.neg())
    else:

        def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return function(a.neg(), b.neg(), c.neg())

    (matmul,) = _matmuls(step, *inputs)
    letter = {one: str(one.node.args[0].target) for one in (*matmul.operands, *matmul.addends)}
    assert {one.role: letter[one] for one in matmul.operands} == {
        role: f"L_{argument}_" for role, argument in operands.items()
    }
    assert [letter[one] for one in matmul.addends] == ([f"L_{addend}_"] if addend else [])
    for one in (*matmul.operands, *matmul.addends):
        assert argument_at(matmul.node, one.path) is one.node


@pytest.mark.parametrize("name", [one for one in _FORMS if "attention" not in one])
def test_matmul_is_linear_in_each_operand_and_adds_its_addends(name: str) -> None:
    # The property that every rewrite rests on, checked on numbers rather than on names.
    function, shapes, operands, addend = _FORMS[name]
    inputs = {key: torch.randn(*shape) for key, shape in zip("abc", shapes, strict=False)}
    expected = function(*inputs.values())
    scaled = dict(inputs)
    for index, letter in enumerate(operands.values()):
        scaled[letter] = scaled[letter] * 2.0 ** (index + 3)
    common = 2.0 ** sum(index + 3 for index in range(len(operands)))
    if addend:
        scaled[addend] = scaled[addend] * common
    assert torch.equal(function(*scaled.values()), expected * common)


def test_one_tensor_as_both_operands() -> None:
    (matmul,) = _matmuls(lambda x: x @ x, torch.randn(4, 4))
    assert [one.path for one in matmul.operands] == [(0,), (1,)]
    assert matmul.operands[0].node is matmul.operands[1].node


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_matmuls_of_other_dtypes_are_ignored(dtype: torch.dtype) -> None:
    inputs = torch.ones(3, 3).to(dtype), torch.ones(3, 3).to(dtype)
    if dtype != torch.bool:  # which has no matmul
        assert _matmuls(torch.matmul, *inputs) == []
    assert _matmuls(torch.logical_and, *inputs) == []


def test_matmul_with_out_argument_is_ignored() -> None:
    def function(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return torch.mm(a, b, out=out)

    assert _matmuls(function, torch.ones(3, 3), torch.ones(3, 3), torch.ones(3, 3)) == []
