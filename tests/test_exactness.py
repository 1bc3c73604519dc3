"""Features of real models in which captured steps once differed from eager ones."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.functional.scale import multiply
from lightning_unitscale.transforms import lossless_unit_scale, simulate_format, track_scales
from tests.helpers import IS_TORCH_2_11


def assert_same_step(module: nn.Module, *args: Tensor) -> nn.Module:
    """Loss and gradients of the plain and of the unit-scaled module, bit for bit."""
    scaled = lossless_unit_scale(module, *args)
    for _ in range(2):
        losses = []
        for one in (module, scaled):
            one.zero_grad()
            torch.manual_seed(3)
            np.random.seed(3)
            loss = one(*args)
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        for (name, plain), ours in zip(module.named_parameters(), scaled.parameters(), strict=True):
            assert plain.grad is not None and ours.grad is not None
            assert torch.equal(plain.grad, ours.grad), name
    return scaled


class _ParallelScan(nn.Module):
    """Takes a parallel algorithm, with other rounding, where a compiler asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.decay = nn.Parameter(torch.rand(8))
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(_scan(self.inner(x), self.decay)).square().sum()


def _scan(x: Tensor, decay: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        powers = torch.arange(x.size(1) - 1, -1, -1)
        return torch.vmap(lambda row: (row * decay ** powers[:, None]).sum(0))(x)
    state = torch.zeros_like(x[:, 0])
    for step in x.unbind(1):
        state = decay * state + step
    return state


def test_compiler_only_branch_is_not_taken() -> None:
    scaled = assert_same_step(_ParallelScan(), torch.randn(3, 7, 8))
    assert "5 of 5 matmuls scaled" in scaled.explain()  # type: ignore[operator]


class _MatmulInVmap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.vmap(lambda row: torch.tanh(row * 0.1) @ self.weight)(self.inner(x))
        return (y * 3).square().mean()


def test_matmuls_inside_vmap_are_scaled() -> None:
    scaled = assert_same_step(_MatmulInVmap(), torch.randn(4, 6))
    assert "5 of 5 matmuls scaled" in scaled.explain()  # type: ignore[operator]


# Until then Dynamo passes over what is left of a frame that computes with a NumPy array itself.
TAKES_FRAMES_WITH_ARRAYS = pytest.mark.skipif(IS_TORCH_2_11, reason="needs torch 2.12")


class _NumpyMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.from_numpy(np.random.random_sample(6) > 0.3)
        return (self.linear(x) * keep).square().mean()


@TAKES_FRAMES_WITH_ARRAYS
def test_numpy_random_numbers_match_plain_step() -> None:
    assert_same_step(_NumpyMask(), torch.randn(4, 6))


@TAKES_FRAMES_WITH_ARRAYS
def test_calibration_restores_numpy_random_state() -> None:
    np.random.seed(5)
    expected = np.random.random_sample()
    np.random.seed(5)
    lossless_unit_scale(_NumpyMask(), torch.randn(4, 6))
    assert np.random.random_sample() == expected


class _Slices(nn.Module):
    """Vectors and their remainders have other last bits: a slice must stay a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 5, padding=4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)[..., : x.size(-1)]
        gate, value = self.out(F.silu(y).transpose(1, 2)).chunk(2, -1)
        return (F.gelu(gate) * value).square().sum()


def test_slices_keep_their_layout() -> None:
    assert_same_step(_Slices(), torch.randn(2, 4, 13))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :, :7],
        lambda x: x[..., 3],
        lambda x: x[:, 1],
        lambda x: x.transpose(0, 2)[:5],
        lambda x: x[:, :1].expand(-1, 6, -1)[..., ::2],
        lambda x: x.permute(2, 0, 1),
    ],
)
def test_multiply_keeps_mergeable_dimensions(view) -> None:  # type: ignore[no-untyped-def]
    tensor = view(torch.randn(3, 6, 11))
    result = multiply(tensor, torch.tensor(4.0))
    assert torch.equal(result, tensor * 4.0)
    order = sorted((d for d in range(tensor.dim()) if tensor.size(d) > 1), key=tensor.stride)
    assert result.stride(order[0]) == 1 or tensor.stride(order[0]) != 1
    for inner, outer in itertools.pairwise(order):
        merges = tensor.stride(outer) == tensor.stride(inner) * tensor.size(inner)
        assert merges == (result.stride(outer) == result.stride(inner) * result.size(inner))
    # A cache line for each gap at most.
    assert result.untyped_storage().nbytes() <= (4 + 64) * tensor.numel() + 64


class _HooksOnFirstCall(nn.Module):
    """Puts hooks on its submodules in its first call and remembers that it did."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.installed = False
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.linear.register_forward_hook(lambda _, __, y: self.seen.append(y))
            self.installed = True
        self.seen.clear()
        y = self.linear(x)
        return (y + torch.stack(self.seen).sum(0)).square().mean()


def test_hooks_installed_by_step_are_installed_once() -> None:
    assert_same_step(_HooksOnFirstCall(), torch.randn(3, 4))


class _Layer(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.weight.mul_(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x


class _BreaksBetweenLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(100.0**i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x.square().mean()


def test_layers_sharing_captured_code_have_separate_units() -> None:
    scaled = assert_same_step(_BreaksBetweenLayers(), torch.randn(3, 8))
    gauge = scaled.gauge()  # type: ignore[operator]
    weights = [gauge[f"layers.{i}.linear.linear:weight"].log2_sigma for i in range(3)]
    assert weights[2] - weights[1] in {6, 7} and weights[1] - weights[0] in {6, 7}


class _WrittenThroughAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,inh->bnh", x, self.weight)
        z = y.reshape(y.size(0), -1)[:, 1:]
        z *= 1e-4
        return z.square().sum()


def test_matmul_with_mutated_view_has_gradient_unit() -> None:
    scaled = assert_same_step(_WrittenThroughAView(), torch.randn(5, 4))
    assert scaled.gauge()["matmul"].log2_gamma < -10  # type: ignore[operator]


class _SelfNormalizing(nn.Module):
    """A module of in-place ELU and its relatives, which compute their gradient from the result."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), activation, nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("kind", [nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.SiLU, nn.RReLU])
def test_in_place_activations_are_bit_identical(kind) -> None:  # type: ignore[no-untyped-def]
    assert_same_step(_SelfNormalizing(kind(inplace=True)), torch.randn(64, 8) * 3)


class _OneImage(nn.Module):
    """Channels-last with one row of pixels: the strides of dimensions of size 1 say so."""

    def __init__(self, ones: int) -> None:
        super().__init__()
        shape = [(1, 2, 1, 3), (1, 2, 4, 3), (2, 2, 1, 3)][ones]
        image = torch.randn(shape).contiguous(memory_format=torch.channels_last)
        self.image = nn.Parameter(image * 5)
        places = torch.randint(6, shape).contiguous(memory_format=torch.channels_last)
        self.register_buffer("places", places)
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_unpool2d(self.image * self.one, self.places, (3, 2), stride=2)
        # Sums are in the order of memory.
        return (y * x[: y.numel()].view(y.shape)).sum()


@pytest.mark.parametrize("ones", range(3))
def test_image_memory_layout_is_kept(ones: int) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        assert_same_step(_OneImage(ones), torch.randn(1000) * 10)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):  # type: ignore[no-untyped-def]
        return x * y

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        return grad_output, None


class _HalfTrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_NoGradient.apply(self.one(x), self.other(x))).square().mean()


@pytest.mark.parametrize("way", ["lossless", "tracked", "simulated"])
def test_missing_gradient_is_not_a_zero_gradient(way: str) -> None:
    """An optimizer decays and moves a parameter with zeros, and leaves one without a gradient."""
    plain, x = _HalfTrained(), torch.randn(5, 6)
    changed = {
        "lossless": lambda module: lossless_unit_scale(module, x),
        "tracked": track_scales,
        "simulated": lambda module: simulate_format(module, "E4M3FN", "E5M2"),
    }[way](plain)
    plain(x).backward()
    expected = [one.grad for one in plain.parameters()]
    plain.zero_grad()
    changed.zero_grad()
    changed(x).backward()
    found = {name: one.grad for name, one in changed.named_parameters()}
    assert [name for name, grad in found.items() if grad is None] == ["other.weight", "other.bias"]
    for grad, wanted in zip(found.values(), expected, strict=True):
        assert (grad is None) == (wanted is None)
        if way != "simulated" and grad is not None:
            assert torch.equal(grad, wanted)
