"""The oracle of every rule is a Monte-Carlo run of the operation itself."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_unitscale.functional.rules import (
    Factors,
    ScaleRule,
    register_rule,
    registered_rules,
    rule_of_function,
    rule_of_method,
)
from tests.functional.rule_cases import CASES, Case, made

RULES = {rule.name: rule for rule in reversed(registered_rules())}


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def leaves(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors among the arguments of a call, those in lists by their position."""
    for name, value in arguments.items():
        if isinstance(value, (list, tuple)):
            yield from leaves({f"{name}.{index}": item for index, item in enumerate(value)})
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield name, value


def monte_carlo(case: Case, mult: float) -> dict[str, tuple[float, int]]:
    """RMS times factor, and number of elements, of the output and of each gradient."""
    rule = RULES[case.name]
    args, kwargs = case.call()
    arguments = rule.bind(tuple(args), kwargs)
    tensors = [leaf for leaf in leaves(arguments) if leaf[0].partition(".")[0] not in case.skip]
    for _, tensor in tensors:
        tensor.requires_grad_()
    factors = rule.factors({**arguments, "mult": mult})
    args[0] = args[0] * mult if mult != 1 else args[0]
    output = case.function(*args, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    of_one = rule.kind == "loss" or output.dim() == 0
    grad_output = torch.ones_like(output) if of_one else torch.randn_like(output)
    gradients = torch.autograd.grad(
        output, [tensor for _, tensor in tensors], grad_output, allow_unused=True
    )
    results = {}
    if rule.kind != "loss":
        results["output"] = (rms(output) * factors.output, output.numel())
    for (name, tensor), gradient in zip(tensors, gradients, strict=True):
        factor = factors.gradients.get(name)
        if gradient is not None and factor is not None:
            results[name] = (rms(gradient) * factor, tensor.numel())
    return results


def check(case: Case, mult: float) -> None:
    results = monte_carlo(case, mult)
    assert set(results) - {"output"}
    for name, (product, numel) in results.items():
        if name in case.skip:
            continue
        # The rule's tolerance, and three standard deviations of an RMS over so few numbers.
        tolerance = case.own.get(name, case.tolerance) + 3 / math.sqrt(2 * numel)
        assert product == pytest.approx(1, abs=tolerance), (name, results)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_factors_bring_output_and_gradients_to_unit_scale(case: Case) -> None:
    check(case, mult=1.0)


# Where the first argument may have another scale: not classes, probabilities, nor what assumes that
# running statistics, or logits near 0, are those of the input.
_NO_MULT = {
    "batch_norm", "binary_cross_entropy", "cross_entropy", "einsum", "embedding", "embedding_bag",
    "kl_div", "log_softmax", "multi_dot", "nll_loss", "cat", "stack",
}  # fmt: skip


@pytest.mark.parametrize("mult", [2.0, pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in _NO_MULT], ids=str)
def test_mult_scales_first_argument(case: Case, mult: float) -> None:
    check(case, mult)


def test_every_rule_has_a_case_and_a_reference() -> None:
    assert set(RULES) == {case.name for case in CASES}
    for rule in registered_rules():
        assert rule.reference
        assert set(rule.weights) <= set(rule.parameters)


def test_gradient_factors_belong_to_parameters() -> None:
    for case in CASES:
        rule = RULES[case.name]
        args, kwargs = case.call()
        factors = rule.factors(rule.bind(tuple(args), kwargs))
        assert {name.partition(".")[0] for name in factors.gradients} <= set(rule.parameters)
        assert all(
            math.isfinite(value) and value > 0
            for value in (factors.output, *factors.gradients.values())
        )


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("relu", [F.relu, torch.relu, F.relu_, torch.relu_, "relu", "relu_"]),
        ("gelu", [F.gelu]),
        ("tanh", [F.tanh, torch.tanh, "tanh", "tanh_"]),
        ("sigmoid", [F.sigmoid, torch.sigmoid, torch.special.expit, "sigmoid", "sigmoid_"]),
        ("elu", [F.elu, F.elu_]),
        ("erf", [torch.erf, torch.special.erf, "erf"]),
        ("rrelu", [F.rrelu, torch.rrelu, F.rrelu_]),
        ("prelu", [F.prelu, torch.prelu, "prelu"]),
        ("threshold", [F.threshold, torch.threshold, F.threshold_]),
        ("softmax", [F.softmax, torch.softmax, torch.special.softmax, "softmax"]),
        ("log_softmax", [F.log_softmax, torch.log_softmax, "log_softmax"]),
        ("linear", [F.linear]),
        ("matmul", [torch.matmul, torch.linalg.matmul, operator.matmul, "matmul", "__matmul__"]),
        ("mm", [torch.mm, "mm"]),
        ("bmm", [torch.bmm, "bmm"]),
        ("addmm", [torch.addmm, "addmm"]),
        ("baddbmm", [torch.baddbmm, "baddbmm"]),
        ("conv2d", [F.conv2d, torch.conv2d]),
        ("conv_transpose3d", [F.conv_transpose3d, torch.conv_transpose3d]),
        ("scaled_dot_product_attention", [F.scaled_dot_product_attention]),
        ("layer_norm", [F.layer_norm, torch.layer_norm]),
        ("batch_norm", [F.batch_norm, torch.batch_norm]),
        ("max_pool2d", [F.max_pool2d, torch.max_pool2d]),
        ("add", [torch.add, operator.add, operator.iadd, "add", "add_", "__iadd__"]),
        ("sub", [torch.sub, operator.sub, operator.isub, "sub", "sub_"]),
        ("mul", [torch.mul, operator.mul, operator.imul, "mul", "mul_"]),
        ("mean", [torch.mean, "mean"]),
        ("sum", [torch.sum, "sum"]),
        ("cat", [torch.cat, torch.concat, torch.concatenate]),
        ("dropout", [F.dropout, torch.dropout]),
        ("cross_entropy", [F.cross_entropy]),
    ],
)
def test_every_call_form_has_rule(name: str, forms: list[Any]) -> None:
    for form in forms:
        rule = rule_of_method(form) if isinstance(form, str) else rule_of_function(form)
        assert rule is not None, form
        assert rule.name == name


@pytest.mark.parametrize(
    "function",
    # Steps of something larger, which a factor in its midst would change; joins of lists.
    [torch.exp, torch.cos, torch.square, torch.rsqrt, torch.pow, operator.concat, torch.where, []],
)
def test_functions_without_rule(function: object) -> None:
    assert rule_of_function(function) is None
    assert rule_of_method("view") is None


@pytest.mark.parametrize(
    ("first", "second"), [(F.batch_norm, torch.batch_norm), (F.instance_norm, torch.instance_norm)]
)
def test_orders_of_parameters_differ_between_namespaces(first: Any, second: Any) -> None:
    names = ["running_mean", "running_var", "weight", "bias"]
    for function, expected in ((first, names), (second, names[2:] + names[:2])):
        rule = rule_of_function(function)
        assert rule is not None
        assert list(rule.parameters[1:5]) == expected


def test_bind_matches_arguments_to_parameters() -> None:
    rule = RULES["linear"]
    assert rule.bind((1, 2), {"bias": 3}) == {"input": 1, "weight": 2, "bias": 3}
    with pytest.raises(TypeError, match=r"linear: 4 positional arguments. Expected at most 3"):
        rule.bind((1, 2, 3, 4), {})
    with pytest.raises(TypeError, match="'weight' is given by position and by name"):
        rule.bind((1, 2), {"weight": 3})
    einsum = RULES["einsum"]
    assert einsum.bind(("ij,jk", 1, 2), {}) == einsum.bind(("ij,jk", [1, 2]), {})
    relu = RULES["relu"]  # nn.ReLU passes `inplace` on
    assert relu.bind((1, True), {}) == {"input": 1, "inplace": True}


def test_custom_rule_is_registered() -> None:
    def swish(input: Tensor) -> Tensor:
        return input * torch.sigmoid(input)

    rule = ScaleRule("swish", ("input",), lambda _: Factors(2.0), "activation", "none")
    assert register_rule(rule, swish) is rule
    assert rule_of_function(swish) is rule


_SYMBOLIC = (
    "linear", "conv2d", "softmax", "add", "cross_entropy", "scaled_dot_product_attention",
    "embedding", "max_pool2d",
)  # fmt: skip


@pytest.mark.parametrize("case", [case for case in CASES if case.name in _SYMBOLIC], ids=str)
def test_symbolic_sizes_give_the_same_factors_and_no_guards(case: Case) -> None:
    rule = RULES[case.name]
    args, kwargs = case.call()
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    arguments = rule.bind(tuple(args), kwargs)
    symbolic = {name: fake(value) for name, value in arguments.items()}
    first = symbolic[rule.parameters[0]]
    assert any(isinstance(size, torch.SymInt) for size in first.shape)
    with mode:
        assert rule.factors(symbolic) == rule.factors(arguments)
    assert not shape_env.guards


def test_empty_shapes_give_finite_factors() -> None:
    # An empty batch must not divide by zero: no factor matters for it.
    for name, shapes in {
        "linear": [(0, 4), (3, 4)],
        "matmul": [(0, 4), (4, 3)],
        "embedding": [(0,), (5, 4)],
        "conv1d": [(0, 4, 9), (3, 4, 3)],
        "mse_loss": [(0,), (0,)],
    }.items():
        rule = RULES[name]
        tensors = tuple(torch.zeros(shape) for shape in shapes)
        assert math.isfinite(rule.factors(rule.bind(tensors, {})).output)


def test_factors_match_published_formulas() -> None:
    """The published formulas, at sizes where a slip would show."""

    def factors(name: str, *args: Any, **kwargs: Any) -> Factors:
        rule = RULES[name]
        return rule.factors(rule.bind(tuple(made(arg) for arg in args), kwargs))

    zeros = torch.zeros
    linear = factors("linear", zeros(3, 4, 50), zeros(20, 50), zeros(20))
    assert linear == Factors(
        pytest.approx(50**-0.5),
        {"input": pytest.approx(20**-0.5), "weight": pytest.approx(12**-0.5),
         "bias": pytest.approx(12**-0.5)},
    )  # fmt: skip
    product = factors("matmul", zeros(6, 50), zeros(50, 8))
    assert product.output == pytest.approx(50**-0.5)
    assert product.gradients["input"] == pytest.approx(8**-0.5)
    assert product.gradients["other"] == pytest.approx(6**-0.5)
    conv = factors("conv1d", zeros(2, 6, 20), zeros(8, 3, 5), None, 2, (2,), 1, 2)
    assert conv.output == pytest.approx(15**-0.5)
    assert conv.gradients["input"] == pytest.approx((2 * 2 / (8 * 5)) ** 0.5)
    assert conv.gradients["weight"] == pytest.approx((2 * 10) ** -0.5)
    norm = factors("layer_norm", zeros(3, 4, 50), (50,))
    assert norm.gradients["weight"] == pytest.approx((50 / 600) ** 0.5)
    assert factors("embedding", zeros(3, 4), zeros(50, 7)).gradients["weight"] == pytest.approx(
        (50 / 12) ** 0.5
    )
    assert factors("dropout", zeros(3), 0.3).output == pytest.approx(0.7**0.5)
    assert factors("add", zeros(3, 4), zeros(4)).output == pytest.approx(0.5**0.5)
    assert factors("add", zeros(3, 4), zeros(4)).gradients["other"] == pytest.approx(3**-0.5)
    assert factors("add", zeros(3, 4), 1.0).output == 1
    loss = factors("cross_entropy", zeros(12, 50), zeros(12).long())
    assert loss.gradients["input"] == pytest.approx(12 * 50 / 49**0.5)
    assert factors("mse_loss", zeros(12), zeros(12)).gradients["input"] == pytest.approx(
        12 * 8**-0.5
    )
