"""Gradients of a tensor with several readers are added in the order of the unscaled run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.transforms import lossless_unit_scale
from tests.helpers import assert_same_bits, run, sampled
from tests.monitor.tracked import probed_copy

# Operations on a square matrix that has another reader.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # One tensor in several places.
    "square matmul": lambda t: t @ t,
    "power": lambda t: (t @ t) @ t,
    "addmm": lambda t: torch.addmm(t, t, t),
    "multi_dot": lambda t: torch.linalg.multi_dot([t, t, t]),
    "einsum": lambda t: torch.einsum("ij,jk,kl->il", t, t, t),
    "batched": lambda t: t[None, None] @ t[None, None],
    "linear": lambda t: F.linear(t, t, t[0]),
    "attention": lambda t: F.scaled_dot_product_attention(*[t[None, None]] * 3)[0, 0],
    "attention as matmuls": lambda t: F.scaled_dot_product_attention(
        *[t[None, None]] * 3, dropout_p=0.1
    )[0, 0],
    "add": lambda t: torch.add(t, t, alpha=0.3),
    "addcmul": lambda t: torch.addcmul(t, t, t, value=0.3),
    "div": lambda t: t / t,
    "lerp": lambda t: torch.lerp(t, t, t),
    "atan2": lambda t: torch.atan2(t, t),
    # One place, several operations of autograd.
    "rms_norm": lambda t: F.rms_norm(t, (8,)),
    "rms_norm of a view": lambda t: F.rms_norm(t.view(4, 16), (16,)).view(8, 8),
    "normalize": F.normalize,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "diff": torch.diff,
    "trapezoid": torch.trapezoid,
    "poisson": lambda t: F.poisson_nll_loss(t, t.detach().abs()),
    "triplet": lambda t: F.triplet_margin_loss(t, t * 2, t.roll(1)),
    "cosine": lambda t: F.cosine_embedding_loss(t, t.sin(), torch.ones(8)),
    "alpha dropout": lambda t: F.alpha_dropout(t, 0.4),
    "alpha dropout, training": lambda t: F.alpha_dropout(t, 0.4, training=True),
    # A complex argument, which has no units, beside a real one.
    "istft": lambda t: _inverse(t),
    # Computed in another way for gradients of another size.
    "logcumsumexp": lambda t: torch.logcumsumexp(t * 3, 1),
    "matrix_exp": lambda t: torch.matrix_exp(t * 2),
    "linalg.matrix_exp": lambda t: torch.linalg.matrix_exp(t - t.T),
}


def _inverse(t: Tensor) -> Tensor:
    window = torch.hann_window(16)
    spectrum = torch.stft(t.reshape(-1), 16, 4, window=window, return_complex=True)
    return torch.istft(spectrum, 16, 4, window=window)


class Shared(nn.Module):
    """Two more readers of the matrix, one before and one after the operation."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self.first = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        matrix = (self.weight + self.first(x).mean(0)).tanh()
        before = matrix.cos()
        result = self.operation(matrix).mean() * 3 + (before + matrix.sin() * 2).mean()
        return result * 3e-3


def _shared(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Shared(OPERATIONS[name]), torch.randn(4, 6, requires_grad=True)


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradient_of_tensor_with_several_readers(name: str) -> None:
    module, x = _shared(name)
    torch.manual_seed(3)
    scaled = lossless_unit_scale(module, x)
    assert any(pair.log2_gamma for pair in scaled.gauge().values())
    assert_same_bits(run(scaled, x), run(module, x))


@pytest.mark.parametrize("name", sampled(OPERATIONS, 3))
def test_probes_keep_order_of_addition(name: str) -> None:
    module, x = _shared(name)
    probed, _ = probed_copy(module)
    assert_same_bits(run(probed, x), run(module, x))


class Normed(nn.Module):
    """A residual stream with ``nn.RMSNorm`` in front of each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(3))
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x)).relu()
        return (x * 1e-6).square().mean()


def test_gradients_of_a_normed_residual_stream_keep_units() -> None:
    torch.manual_seed(0)
    module, x = Normed(), torch.randn(5, 8)
    scaled = lossless_unit_scale(module, x)
    assert_same_bits(run(scaled, x), run(module, x))
    assert scaled.gauge()["branches.1.linear"].log2_gamma < -30
