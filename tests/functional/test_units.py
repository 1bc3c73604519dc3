"""Changes of units are exact for first derivatives, and right for those of derivatives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_unitscale.functional.scale import (
    change_gradient_units,
    change_units,
    forget_recorded_backward,
    takes_true_derivatives,
)
from tests.helpers import assert_same_bits


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    forget_recorded_backward()
    yield
    forget_recorded_backward()


def _power(exponent: int) -> Tensor:
    return torch.tensor(2.0**exponent)


def _plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def _in_units(x: Tensor, w: Tensor) -> Tensor:
    """The operands in units 2^-3 and 2^-4, the gradient that arrives in the unit 2^-6."""
    x = change_units(x, _power(3), _power(-6 - 7 + 3))
    w = change_units(w, _power(4), _power(-6 - 7 + 4))
    y = change_units(x @ w, _power(-7), _power(6))
    return change_gradient_units(torch.tanh(change_gradient_units(y, _power(5))), _power(-5))


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(5, 4, generator=generator).requires_grad_(),
        torch.randn(4, 3, generator=generator).requires_grad_(),
    )


def test_first_derivatives_are_the_bits_and_in_units() -> None:
    results = [
        torch.autograd.grad(function(*inputs).square().sum(), inputs)
        for function, inputs in ((_plain, _inputs()), (_in_units, _inputs()))
    ]
    assert_same_bits(results[1], results[0])
    assert not takes_true_derivatives()
    x = torch.ones(3, requires_grad=True)
    change_units(x, _power(1), _power(2)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * 3


def _penalized(function, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    x, _ = inputs
    y = function(*inputs)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().sum() + gradient.square().sum()
    return loss.detach(), gradient.detach(), *torch.autograd.grad(loss, inputs)


def test_second_derivatives_are_those_of_the_plain_function() -> None:
    plain, ours = _penalized(_plain, _inputs()), _penalized(_in_units, _inputs())
    assert takes_true_derivatives()
    assert_same_bits(ours[:2], plain[:2])
    for first, other in zip(ours[2:], plain[2:], strict=True):
        torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-6)


def test_a_graph_from_before_may_be_used_after() -> None:
    """Two losses of one graph: units of gradients end between their backward passes."""
    inputs = _inputs()
    y = _in_units(*inputs)
    torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    assert not takes_true_derivatives()
    torch.autograd.grad(y.sum(), inputs, create_graph=True)
    after = torch.autograd.grad(y.square().sum(), inputs)
    other = _inputs()
    assert_same_bits(after, torch.autograd.grad(_plain(*other).square().sum(), other))
