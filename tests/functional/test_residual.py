"""Residual branches: weighted outside, at unit scale inside."""

import pytest
import torch
from torch import Tensor

import lightning_unitscale.functional as U


@pytest.mark.parametrize("tau", [0.0, 0.01, 0.5, 1.0, 3.0])
def test_residual_apply_matches_weighted_sum(tau: float) -> None:
    x, w = torch.randn(8, 6, requires_grad=True), torch.randn(6, 6)
    output = U.residual_apply(lambda h: h @ w, x, tau)
    expected = (x + tau * (x @ w)) / (1 + tau**2) ** 0.5
    torch.testing.assert_close(output, expected)
    grad_output = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, x, grad_output)
    (true,) = torch.autograd.grad(expected, x, grad_output)
    torch.testing.assert_close(gradient, true)


def test_gradient_inside_branch_is_at_unit_scale() -> None:
    seen: list[Tensor] = []

    def branch(h: Tensor) -> Tensor:
        h = h * 1.0
        h.register_hook(seen.append)
        return h

    x = torch.randn(100, 100, requires_grad=True)
    output = U.residual_apply(branch, x, tau=1e-3)
    output.backward(torch.randn_like(output))
    assert seen[0].square().mean().sqrt().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("tau", [0.1, 1.0, 2.0])
def test_residual_add_and_split_keep_unit_scale(tau: float) -> None:
    residual, skip = torch.randn(2, 200, 200).unbind()
    total = U.residual_add(residual, skip, tau)
    assert total.square().mean().sqrt().item() == pytest.approx(1, abs=0.02)
    x = torch.randn(200, 200, requires_grad=True)
    (gradient,) = torch.autograd.grad(U.residual_split(x, tau), x, (residual, skip))
    assert gradient.square().mean().sqrt().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("tau", [-0.1, float("inf"), float("nan")])
def test_bad_tau_is_an_error(tau: float) -> None:
    with pytest.raises(ValueError, match=f"tau={tau}: not a weight of a residual branch"):
        U.residual_split(torch.ones(2), tau)
