"""Types: narrow and wide ones, autocast, complex numbers, integers, sparse layouts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conformance.cases import Zoo, each, linear, noise, rows, weighted_sum

zoo = Zoo("types")
CASES = zoo.cases


def _scaled_up(output: Any) -> Tensor:
    """Scale the loss like a gradient scaler, so that gradients are normal FP16 numbers."""
    return weighted_sum(output) * 32.0


FLOATS = {"double": torch.float64, "bfloat16": torch.bfloat16, "half": torch.float16}


class Typed(nn.Module):
    """Linear layers, an attention and a convolution in one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        h = F.scaled_dot_product_attention(*(h.view(1, 2, 2, 8),) * 3).reshape(4, 8)
        return self.last(self.conv(h[None])[0])


def _signs(index: int, *shape: int) -> Tensor:
    """Numbers of one size, so that all results are normal numbers of FP16."""
    return torch.randn(*shape).sign() * (1 + index) / 4


for _name, _dtype in FLOATS.items():
    zoo.add(
        _name,
        lambda dtype=_dtype: Typed(dtype),
        each(lambda i, dtype=_dtype: (_signs(i, 4, 8).to(dtype),)),
        loss=_scaled_up,
    )
    zoo.add(
        f"{_name}_recurrent",
        lambda dtype=_dtype: nn.GRU(8, 4).to(dtype),
        each(lambda i, dtype=_dtype: (_signs(i, 5, 2, 8).to(dtype),)),
        loss=_scaled_up,
    )


@zoo.step()
def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        h = F.gelu(m.a(x))
        return F.layer_norm(m.b(h) @ h.mT, (4,))


@zoo.step(each(lambda i: (_signs(i, 4, 8),)), loss=_scaled_up)
def autocast_half(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.float16):
        return m.b(F.gelu(m.a(x)))


@zoo.step()
def autocast_switched_off_within(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        h = m.a(x)
        with torch.autocast(x.device.type, enabled=False):
            h = m.b(h.float())
        return m.a(h)


@zoo.step(rows(4, 8), a=linear(), b=linear())
def autocast_attention(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        q = m.a(x).view(1, 2, 4, 4)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.1)
        return m.b(h.reshape(4, 8))


@zoo.step(rows(2, 3, 6, 6), a=lambda: nn.Conv2d(3, 4, 3), b=lambda: nn.Conv2d(4, 2, 1))
def autocast_convolutions(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return m.b(F.relu(m.a(x)))


@zoo.step()
def autocast_under_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        h = m.a(x)
        return torch.utils.checkpoint.checkpoint(
            lambda y: m.b(F.gelu(m.a(y))), h, use_reentrant=False
        )


@zoo.step()
def casts_between_matmuls(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).double()
    h = h @ m.b.weight.double()
    return m.b(h.bfloat16().float())


@zoo.step(a=lambda: nn.Linear(8, 8).double(), b=linear())
def layers_of_two_types(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x.double()).float())


@zoo.step()
def default_type_is_changed(m: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        wide = torch.ones(8, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    return m.b(m.a(x)).double() @ wide


@zoo.step(rows(4, 8, dtype=torch.complex64), a=lambda: nn.Linear(8, 8, dtype=torch.complex64))
def complex_linear(m: Any, z: Tensor) -> Tensor:
    return m.a(z) @ z.mH


@zoo.step(a=lambda: nn.Parameter(torch.randn(8, 4, dtype=torch.complex64)), b=linear())
def complex_matmul_of_real_numbers(m: Any, x: Tensor) -> Tensor:
    z = torch.complex(m.b(x), x) @ m.a
    return torch.view_as_real(z)


@zoo.step(rows(2, 3, 6, dtype=torch.complex64), a=lambda: nn.Conv1d(3, 4, 3).to(torch.complex64))
def complex_convolution(m: Any, z: Tensor) -> Tensor:
    return m.a(z).abs()


@zoo.step()
def rotary_positions(m: Any, x: Tensor) -> Tensor:
    q = torch.view_as_complex(m.a(x).view(4, 4, 2))
    turns = torch.polar(torch.ones(4, 4), torch.arange(16.0).view(4, 4))
    return m.b(torch.view_as_real(q * turns).flatten(1)) @ x.mT


@zoo.step()
def conjugates_and_negatives(m: Any, x: Tensor) -> Tensor:
    z = torch.complex(m.a(x), m.b(x))
    return (z.conj() @ z.mT).imag.neg() @ z.conj().imag


@zoo.step()
def spectral_layer(m: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(m.a(x))
    mixed = torch.einsum(
        "bi,ij->bj", spectrum, torch.complex(m.b.weight[:5, :5], m.b.weight[3:, 3:])
    )
    return torch.fft.irfft(mixed, n=8)


@zoo.step(on_cpu="torch multiplies matrices of integers on a CPU only")
def integer_matmuls(m: Any, x: Tensor) -> Tensor:
    counts = (x > 0).long() @ torch.arange(16).view(8, 2)
    return m.b(m.a(x)) * counts.sum(1, keepdim=True)


@zoo.step()
def boolean_masks(m: Any, x: Tensor) -> Tensor:
    near = (x @ x.mT) > 0
    return (m.a(x) @ m.b(x).mT).masked_fill(~near, -1e9).softmax(-1) @ x


@zoo.step(a=linear(), b=linear(), bits=lambda: torch.arange(64, dtype=torch.uint8).view(8, 8))
def weights_stored_as_bytes(m: Any, x: Tensor) -> Tensor:
    weight = (m.bits.float() - 32.0) * 0.01
    return m.b(F.linear(m.a(x), weight))


@zoo.step()
def float8_in_the_step(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    rounded = h.detach().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return m.b(h + (rounded - h).detach())


@zoo.step()
def fake_quantization(m: Any, x: Tensor) -> Tensor:
    h = torch.fake_quantize_per_tensor_affine(m.a(x), 0.1, 0, -128, 127)
    return m.b(h)


@zoo.step(a=lambda: nn.Linear(8, 4), adjacency=lambda: torch.eye(4).roll(1, 0).to_sparse())
def sparse_adjacency(m: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(m.adjacency, m.a(x)) @ m.a(x).mT


@zoo.step(a=linear(8, 4), adjacency=lambda: torch.eye(4).roll(1, 0).to_sparse_csr())
def sparse_rows(m: Any, x: Tensor) -> Tensor:
    return m.adjacency @ m.a(x)


@zoo.step(each(lambda i: (noise(i, 4, 8).relu().to_sparse(),)), a=linear(8, 4), b=linear(4))
def a_sparse_batch(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.sparse.mm(x, m.a.weight.mT))


@zoo.step()
def sampled_matmuls(m: Any, x: Tensor) -> Tensor:
    mask = torch.eye(4).to_sparse_csr()
    return m.a(x) * torch.sparse.sampled_addmm(mask, m.b(x).detach(), x.mT).to_dense().sum()


@zoo.step(rows(4, 8), a=linear(), b=linear())
def nested_rows(m: Any, x: Tensor) -> Tensor:
    ragged = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return m.b(torch.tanh(m.a(ragged)).values())


@zoo.step()
def scalars_and_empty_shapes(m: Any, x: Tensor) -> Tensor:
    nothing = m.a(x[:0]) @ x.mT
    point = torch.dot(m.b.bias, x[0])
    return m.b(x) * point + nothing.sum() + x[:, :0].sum()


@zoo.step()
def empty_inner_dimension(m: Any, x: Tensor) -> Tensor:
    return m.a(x) + x[:, :0] @ m.b.weight[:0] + m.b(x)


@zoo.step()
def losses_of_many_kinds(m: Any, x: Tensor) -> Tensor:
    h, y = m.a(x), m.b(x).detach()
    total = (
        F.mse_loss(h, y)
        + F.smooth_l1_loss(h, y)
        + F.kl_div(h.log_softmax(-1), y.softmax(-1), reduction="batchmean")
    )
    return total + F.cosine_embedding_loss(h, y, torch.tensor([1, -1, 1, -1]))
