"""``scale``: separate factors for forward and backward."""

import math

import pytest
import torch
from torch import Tensor

from lightning_unitscale.functional import scale, scale_bwd, scale_fwd
from lightning_unitscale.functional.scale import multiply


def _gradient(function, input: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    leaf = input.detach().requires_grad_()
    output = function(leaf)
    (gradient,) = torch.autograd.grad(output, leaf, grad_output)
    return output.detach(), gradient


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_each_direction_has_its_own_factor(as_tensor: bool, dtype: torch.dtype) -> None:
    wrap = torch.tensor if as_tensor else float
    x, g = torch.randn(5, 3).to(dtype), torch.randn(5, 3).to(dtype)
    expected = (x.double() * 0.25).to(dtype), (g.double() * 8).to(dtype)
    for got, want in zip(
        _gradient(lambda t: scale(t, wrap(0.25), wrap(8.0)), x, g), expected, strict=True
    ):
        assert got.dtype == dtype
        assert torch.equal(got, want)
    y, gx = _gradient(lambda t: scale_fwd(t, wrap(0.25)), x, g)
    assert torch.equal(y, expected[0])
    assert torch.equal(gx, g)
    y, gx = _gradient(lambda t: scale_bwd(t, wrap(8.0)), x, g)
    assert torch.equal(y, x)
    assert torch.equal(gx, expected[1])


def test_gradient_differs_from_that_of_a_product() -> None:
    # The oracle is autograd's own product: the same value, and a gradient that is not ours.
    x, g = torch.randn(4), torch.ones(4)
    y, ours = _gradient(lambda t: scale(t, 4.0, 0.5), x, g)
    y_plain, plain = _gradient(lambda t: t * 4.0, x, g)
    assert torch.equal(y, y_plain)
    assert torch.equal(plain, torch.full((4,), 4.0))
    assert torch.equal(ours, torch.full((4,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exponent", [20, 30, -20, -30])
def test_tensor_factors_outside_the_range_of_fp16(dtype: torch.dtype, exponent: int) -> None:
    # 2**20 is inf in FP16 and 2**-30 is 0, but the product of each with x is an ordinary number.
    small = math.ldexp(1.0, -exponent // 2)
    x = (torch.tensor([1.0, -1.5, 1.25]) * small).to(dtype)
    assert (x != 0).all()
    assert x.isfinite().all()
    factor = torch.tensor(math.ldexp(1.0, exponent))
    want = (x.double() * 2.0**exponent).to(dtype)
    assert want.isfinite().all()
    y, gradient = _gradient(lambda t: scale(t, factor, factor), x, x)
    assert torch.equal(y, want)
    assert torch.equal(gradient, want)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_expanded_input_keeps_strides(as_tensor: bool, dtype: torch.dtype) -> None:
    factor = torch.tensor(4.0) if as_tensor else 4.0
    x = torch.randn(3, 1, 2, dtype=dtype).expand(3, 5, 2)
    y = multiply(x, factor)
    assert y.stride() == (2, 0, 1)
    assert torch.equal(y, x.contiguous() * 4)
    # An all-ones gradient, as ``sum().backward()`` makes it, has no memory of its own either.
    leaf = torch.randn(6, dtype=dtype, requires_grad=True)
    strides = []
    leaf_view = leaf * 1
    leaf_view.register_hook(lambda gradient: strides.append(gradient.stride()))
    scale(leaf_view, 1.0, factor).sum().backward()
    assert strides == [(0,)]
    assert torch.equal(leaf.grad, torch.full((6,), 4.0, dtype=dtype))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4).permute(2, 0, 1),
    ],
    ids=["transposed", "channels_last", "permuted"],
)
def test_memory_layout_is_kept(x: Tensor) -> None:
    assert scale(x, 2.0, 1.0).stride() == x.stride()
    assert scale(x.half(), torch.tensor(2.0), 1.0).stride() == x.stride()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (0, 1)])
@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_scalars_and_empty_tensors(shape: tuple[int, ...], factor: float | Tensor) -> None:
    x = torch.full(shape, 3.0)
    y, gradient = _gradient(lambda t: scale(t, factor, factor), x, torch.ones(shape))
    assert torch.equal(y, torch.full(shape, 6.0))
    assert torch.equal(gradient, torch.full(shape, 2.0))
    assert multiply(torch.zeros(1).expand(0), factor).shape == (0,)


def test_special_values_are_unchanged() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    y = scale(x, 4.0, 1.0)
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))


def test_result_does_not_alias_input() -> None:
    x = torch.ones(3)
    y = scale(x, torch.tensor(1.0), 1.0)
    y.add_(1)
    assert torch.equal(x, torch.ones(3))


def test_factors_get_no_gradient() -> None:
    x = torch.randn(3, requires_grad=True)
    forward = torch.tensor(2.0, requires_grad=True)
    backward = torch.tensor(4.0, requires_grad=True)
    scale(x, forward, backward).sum().backward()
    scale_bwd(x, backward).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 8.0))
    assert forward.grad is None
    assert backward.grad is None


def test_backward_uses_factor_of_forward_pass() -> None:
    # The gauge is replaced by a new tensor, never written into; the graph keeps the old one.
    x = torch.randn(3, requires_grad=True)
    factor = torch.tensor(2.0)
    y = scale(x, factor, factor)
    factor = torch.tensor(16.0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager_for_any_factor_without_recompilation(backend: str) -> None:
    def function(x: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
        # Operations that no compiler rounds in its own way.
        y = scale(x.abs(), forward, backward)
        return scale_bwd(scale(y, 0.5, 2.0), backward).square()

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for exponent in (3, -7, 12):
        forward, backward = torch.tensor(2.0**exponent), torch.tensor(2.0 ** (5 - exponent))
        x = torch.randn(7, 5)
        results = []
        for value in (function, compiled):
            leaf = x.clone().requires_grad_()
            output = value(leaf, forward, backward)
            output.sum().backward()
            results.append((output.detach(), leaf.grad))
        (output, gradient), (output_compiled, gradient_compiled) = results
        assert torch.equal(output, output_compiled)
        assert torch.equal(gradient, gradient_compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_compiled_fp16_with_factor_out_of_range() -> None:
    compiled = torch.compile(scale, backend="inductor", fullgraph=True)
    x = torch.full((8,), 2.0**-10, dtype=torch.float16)
    y, gradient = _gradient(
        lambda t: compiled(t, torch.tensor(2.0**20), torch.tensor(2.0**18)), x, x
    )
    assert torch.equal(y, torch.full((8,), 2.0**10, dtype=torch.float16))
    assert torch.equal(gradient, torch.full((8,), 2.0**8, dtype=torch.float16))


@pytest.mark.parametrize(
    "slices", [(slice(1, None, 2),), (slice(None), slice(1, 5)), (slice(3, 9),)]
)
def test_matmul_of_scaled_slice_is_bit_identical(
    slices: tuple[slice, ...],
) -> None:
    # Small products take other steps where rows or the first element are aligned in another way.
    for width in (5, 6, 7, 12):
        whole = torch.randn(40, width)
        x = whole[slices]
        weight = torch.randn(8, x.shape[1])
        result = torch.nn.functional.linear(multiply(x, torch.tensor(4.0)), weight) / 4
        assert torch.equal(result, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("strides", [(6, 1, 6, 2), (36, 1, 12, 2), (6, 3, 3, 1), (60, 1, 20, 4)])
def test_every_stride_is_kept(strides: tuple[int, ...]) -> None:
    """This includes dimensions of size 1, by which convolutions detect channels-last images."""
    x = torch.empty_strided((1, 2, 1, 3), strides).normal_().requires_grad_()
    factor = torch.tensor(2.0)
    for result in (
        scale(x, factor, factor),
        scale_bwd(x, factor),
    ):
        assert result.stride() == strides
