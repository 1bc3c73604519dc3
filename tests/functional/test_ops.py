"""Every operation against torch's own and the factors of its rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_unitscale.functional as U
from lightning_unitscale.functional.rules import registered_rules
from tests.functional.rule_cases import CASES, ELEMENTWISE, Case
from tests.functional.test_rules import RULES, leaves

# Public by other names, or not at all: F has no function of these names.
_NO_OP = {"feature_dropout", "chain_matmul"}
_OPS = [case for case in CASES if case.name not in _NO_OP]
# Attention has a logits scale of its own, and cross_entropy reads targets: see their own tests.
_BY_RULE = [
    case for case in _OPS if case.name not in {"scaled_dot_product_attention", "cross_entropy"}
]
_FIRST_OF_EACH = list({case.name: case for case in reversed(_OPS)}.values())


def results(
    function: Callable[..., Any], case: Case, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """Output, gradients by place, and arguments of one seeded call."""
    torch.manual_seed(5)
    args, kwargs = case.call()
    arguments = RULES[case.name].bind(tuple(args), kwargs)
    # Running statistics take no gradient.
    tensors = {name: tensor for name, tensor in leaves(arguments) if "running" not in name}
    for tensor in tensors.values():
        tensor.data = tensor.data.to(dtype)
        tensor.requires_grad_()
    output = function(*args, **kwargs, **options)
    output = output[0] if isinstance(output, tuple) else output
    gradients = torch.autograd.grad(
        output, list(tensors.values()), torch.randn_like(output), allow_unused=True
    )
    found = {p: g for p, g in zip(tensors, gradients, strict=True) if g is not None}
    return output.detach(), found, arguments


@pytest.mark.parametrize("case", _BY_RULE, ids=str)
@pytest.mark.parametrize("constraint", ["to_output_scale", None])
def test_matches_plain_operation_times_factors(case: Case, constraint: str | None) -> None:
    rule = RULES[case.name]
    op = getattr(U, case.name)
    has_constraint = "constraint" in inspect.signature(op).parameters
    options = {"constraint": constraint} if has_constraint else {}
    output, gradients, arguments = results(op, case, **options)
    plain_output, plain_gradients, _ = results(case.function, case)
    factors = rule.factors(arguments)
    value = plain_output if rule.kind == "loss" else plain_output * factors.output
    torch.testing.assert_close(output, value, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == plain_gradients.keys()
    for place, plain in plain_gradients.items():
        # The factor of a loss's input acts on all of its gradients.
        other = factors.gradients["input"] if rule.kind == "loss" else 1.0
        factor = factors.gradients.get(place, other)
        # A normalization has no constraint to choose: its gradient is the true one.
        is_constrained = constraint is not None or rule.kind == "normalization"
        is_weight = place.partition(".")[0] in rule.weights
        if is_constrained and not is_weight and rule.kind != "loss":
            factor = factors.output
        expected = plain * factor
        scale = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(gradients[place] / scale, expected / scale, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_activations_compile_into_one_graph_with_the_eager_result() -> None:
    def all_of_them(x: Tensor) -> list[Tensor]:
        return [getattr(U, name)(x, **options) for name, _, options in ELEMENTWISE]

    x = torch.randn(30, 40, requires_grad=True)
    compiled = torch.compile(all_of_them, fullgraph=True, backend="aot_eager")
    got, want = compiled(x), all_of_them(x)
    torch.testing.assert_close(got, want)
    grad_outputs = [torch.randn_like(value) for value in want]
    torch.testing.assert_close(
        *(torch.autograd.grad(outputs, x, grad_outputs) for outputs in (got, want))
    )


_ELEMENTWISE_NAMES = {name for name, _, _ in ELEMENTWISE}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "case", [value for value in _FIRST_OF_EACH if value.name not in _ELEMENTWISE_NAMES], ids=str
)
def test_compiles_into_one_graph_with_the_eager_result(case: Case) -> None:
    if case.name == "gaussian_nll_loss":
        pytest.skip("torch's own function reads the values of var")
    op = getattr(U, case.name)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    output, gradients, _ = results(compiled, case)
    expected, expected_gradients, _ = results(op, case)
    assert gradients.keys() == expected_gradients.keys()
    is_random = "dropout" in case.name or case.name == "rrelu"
    for got, want in zip(
        (output, *gradients.values()), (expected, *expected_gradients.values()), strict=True
    ):
        if is_random:  # compiled code may draw other numbers
            assert got.shape == want.shape
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", _FIRST_OF_EACH, ids=str)
def test_16_bit_dtypes_are_kept(case: Case, dtype: torch.dtype) -> None:
    if case.name == "batch_norm":
        pytest.skip("its statistics are in FP32")
    try:
        results(case.function, case, dtype)
    except NotImplementedError as error:
        pytest.skip(f"torch has no such kernel: {error}")
    output, gradients, _ = results(getattr(U, case.name), case, dtype)
    assert output.dtype == dtype
    assert {gradient.dtype for gradient in gradients.values()} == {dtype}
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_every_rule_has_operation_with_torch_signature() -> None:
    for rule in registered_rules():
        if rule.name in _NO_OP or (not hasattr(F, rule.name) and not hasattr(torch, rule.name)):
            continue
        op = getattr(U, rule.name)
        parameters = inspect.signature(op).parameters
        assert op.__name__ == rule.name
        assert op.__doc__
        assert "References:" in op.__doc__
        try:
            torchs = inspect.signature(getattr(F, rule.name)).parameters
        except (AttributeError, TypeError, ValueError):
            continue
        if list(torchs) == ["args", "kwargs"]:
            continue
        new = {"weight"} if rule.name in {"mse_loss"} else set()  # torch 2.13's weights of elements
        assert set(torchs) - new <= set(parameters), rule.name
        same = [name for name in parameters if name in torchs]
        assert same == [name for name in torchs if name in same], rule.name


def test_package_exports_operations_only() -> None:
    for name, value in vars(U).items():
        if not name.startswith("_") and not isinstance(value, ModuleType):
            assert inspect.isfunction(value), name
            assert value.__doc__, name
    assert not hasattr(U, "register_rule")


@pytest.mark.parametrize("name", ["gelu", "silu", "softmax", "tanh", "softplus", "glu"])
@pytest.mark.parametrize("mult", [0.25, 4.0])
def test_mult_multiplies_the_input(name: str, mult: float) -> None:
    x = torch.randn(200, 400, requires_grad=True)
    options = {"dim": -1} if name in {"softmax", "glu"} else {}
    output = getattr(U, name)(x, mult=mult, constraint=None, **options)
    plain = getattr(F, name)(mult * x, **options)
    factor = (output * plain).sum() / plain.square().sum()
    torch.testing.assert_close(output, factor * plain)
    (gradient,) = torch.autograd.grad(output, x, torch.randn_like(output))
    for tensor in (output, gradient):
        assert tensor.square().mean().sqrt().item() == pytest.approx(1, abs=0.1)


def test_silu_glu_is_at_unit_scale() -> None:
    x, gate = torch.randn(2, 300, 300).unbind()
    for mult in (0.5, 1.0, 3.0):
        leaves = [x.clone().requires_grad_(), gate.clone().requires_grad_()]
        output = U.silu_glu(*leaves, mult=mult, constraint=None)
        plain = x * F.silu(mult * gate)
        torch.testing.assert_close(output / plain, (output / plain).mean().expand_as(plain))
        for tensor in (output, *torch.autograd.grad(output, leaves, torch.randn_like(x))):
            assert tensor.detach().square().mean().sqrt().item() == pytest.approx(1, abs=0.02)


def test_linear_readout_factors() -> None:
    x, w = torch.randn(32, 50, requires_grad=True), torch.randn(20, 50, requires_grad=True)
    output = U.linear_readout(x, w)
    torch.testing.assert_close(output, F.linear(x, w) / 50)
    grad_output = torch.randn_like(output)
    gx, gw = torch.autograd.grad(output, (x, w), grad_output)
    torch.testing.assert_close(gx, grad_output @ w * 20**-0.5)
    torch.testing.assert_close(gw, grad_output.T @ x * 32**-0.5)


def test_scale_power_sets_factors() -> None:
    x, w = torch.randn(32, 50, requires_grad=True), torch.randn(20, 50, requires_grad=True)
    output = U.linear(x, w, constraint=None, scale_power=(1.0, 0.25, 0.0))
    torch.testing.assert_close(output, F.linear(x, w) / 50)
    grad_output = torch.randn_like(output)
    gx, gw = torch.autograd.grad(output, (x, w), grad_output)
    torch.testing.assert_close(gx, grad_output @ w * 20**-0.25)
    torch.testing.assert_close(gw, grad_output.T @ x)
    image, kernel = torch.randn(2, 4, 9, 9), torch.randn(3, 4, 3, 3)
    torch.testing.assert_close(
        U.conv2d(image, kernel, scale_power=(1.0, 0.5, 0.5)), F.conv2d(image, kernel) / 36
    )


def test_calls_that_reference_cannot_handle() -> None:
    x, w = torch.randn(4, 6, 8), torch.randn(3, 8)
    assert U.linear(x, w).shape == (4, 6, 3)  # without a bias
    convolved = U.conv1d(x, torch.randn(5, 6, 3), padding=(1,), stride=(1,), dilation=(1,))
    assert convolved.shape == (4, 5, 8)
    assert U.conv1d(x, torch.randn(5, 6, 3), padding="same").shape == (4, 5, 8)
    assert U.conv1d(x[0], torch.randn(5, 6, 3)).shape == (5, 6)
    # The arguments that nn.Softmax passes on.
    assert U.softmax(x, 1, _stacklevel=5).shape == x.shape
    assert U.add(x, 1).equal(x + 1)
    assert U.add(1, x).equal(x + 1)
    torch.testing.assert_close(U.add(x, x, alpha=0.5), 1.5 * x * 1.25**-0.5)
    assert U.matmul(x, torch.randn(8)).shape == (4, 6)


def test_inplace_argument_does_not_change_input() -> None:
    x = torch.randn(5)
    before = x.clone()
    for op in (U.relu, U.silu, U.hardtanh, U.dropout):
        op(x, inplace=True)
    assert x.equal(before)


def test_max_pool_with_indices() -> None:
    x = torch.randn(2, 3, 8, 8)
    output, indices = U.max_pool2d(x, 2, return_indices=True)
    plain, expected = F.max_pool2d(x, 2, return_indices=True)
    assert indices.equal(expected)
    torch.testing.assert_close(output / plain, (output / plain).mean().expand_as(output))


def test_dropout_in_evaluation_is_identity() -> None:
    x = torch.randn(5)
    assert U.dropout(x, training=False).equal(x)


def test_integer_operands_are_not_scaled() -> None:
    x = torch.randn(3, requires_grad=True)
    output = U.mul(x, torch.tensor([1, 0, 1]))
    torch.testing.assert_close(output, x * torch.tensor([1, 0, 1]))


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("softmax", [(3, 4)], {"dim": 5}),
        ("linear", [(3, 4), (2, 5)], {}),
        ("matmul", [(3, 4), ()], {}),
        ("conv2d", [(3, 4), (3, 4)], {}),
        ("conv2d", [(1, 2, 8, 8), (3, 2, 3, 3)], {"unknown": 1}),
        ("cross_entropy", [(), (3,)], {}),
        ("scaled_dot_product_attention", [(3, 4), (3,), (3, 4)], {}),
        ("bilinear", [(3, 4), (3, 4), (4, 4)], {}),
        ("group_norm", [(3,), 1], {}),
    ],
)
def test_shape_errors_match_torch(name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    tensors = [torch.zeros(arg) if isinstance(arg, tuple) else arg for arg in args]
    with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)) as expected:
        getattr(F, name, torch.matmul)(*tensors, **kwargs)
    with pytest.raises(expected.type) as found:
        getattr(U, name)(*tensors, **kwargs)
    if "unknown" not in kwargs:  # of which Python speaks in one form or the other
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: U.gelu(x, constraint="mean"), ValueError, "constraint='mean': unknown"),
        (lambda x: U.relu(x, constraint="to_left_grad_scale"), ValueError, "Expected 2"),
        (lambda x: U.gelu(x, mult=0.0), ValueError, "gelu: mult=0.0: .*Expected a positive number"),
        (lambda x: U.mse_loss(x, x[:1]), ValueError, r"target=\(1, 4\): the shape of input"),
        (lambda x: U.relu(x, mult=float("nan")), ValueError, "relu: mult=nan"),
        (lambda x: U.gelu(x.long()), TypeError, "gelu: input is a tensor of type torch.int64"),
        (lambda x: U.gelu(x.to(torch.complex64)), TypeError, "Expected a real floating-point one"),
        (lambda x: U.linear(x.long(), x), TypeError, "linear: input is a tensor of type"),
        (lambda x: U.linear(x, x, scale_power=(1, 1)), ValueError, r"scale_power=\(1, 1\): exp"),
        (lambda x: U.conv_transpose1d(x), TypeError, "'weight' is missing; its arguments: "),
        (lambda x: U.relu(x, constrain=None), TypeError, "constrain"),
        (lambda x: U.kl_div(x, x, constraint=None), TypeError, "constraint"),
        (lambda x: U.embedding(x.long(), x, max_norm=1.0), ValueError, "max_norm=1.0: it has no"),
        (lambda x: U.embedding(x.long(), x, sparse=True), ValueError, "sparse=True"),
        (
            lambda x: U.embedding(x.long(), x, scale_grad_by_freq=True),
            ValueError,
            "scale_grad_by_freq=True: it has no",
        ),
        (lambda x: U.residual_add(x, x, tau=-1.0), ValueError, "tau=-1.0: not a weight"),
    ],
)
def test_bad_arguments_are_an_error(
    call: Callable[[Tensor], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(torch.zeros(3, 4))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("op", "make"),
    [
        (lambda x, w: U.relu(U.linear(x, w)), lambda n: (torch.randn(n, 4), torch.randn(3, 4))),
        (U.matmul, lambda n: (torch.randn(2, n, 4), torch.randn(4, n))),
        (lambda x: U.softmax(x, -1), lambda n: (torch.randn(n, n),)),
        (U.cross_entropy, lambda n: (torch.randn(n, 4), torch.randint(4, (n,)))),
        (U.conv1d, lambda n: (torch.randn(2, 4, n), torch.randn(3, 4, 3))),
        (U.embedding, lambda n: (torch.randint(7, (n,)), torch.randn(7, 4))),
        (U.scaled_dot_product_attention, lambda n: (torch.randn(1, 2, n, 4),) * 3),
    ],
)
def test_compiles_with_dynamic_shapes(
    op: Callable[..., Tensor], make: Callable[[int], tuple[Tensor, ...]]
) -> None:
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (5, 9):
        args = make(n)
        torch.testing.assert_close(compiled(*args), op(*args))


def test_network_starts_at_unit_scale() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(256, 256) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = U.residual_apply(lambda h, w=weight: U.gelu(U.linear(h, w)), x, tau=0.5)
            return x

    network, x = Network(), torch.randn(512, 256, requires_grad=True)
    output = network(x)
    output.backward(torch.randn_like(output))
    for tensor in (output, x.grad, *(param.grad for param in network.parameters())):
        assert tensor is not None
        assert tensor.detach().square().mean().sqrt().item() == pytest.approx(1, abs=0.6)
