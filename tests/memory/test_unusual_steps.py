"""Profiles of transforms, control flow and unusual leaves of autograd."""

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.profiler import profile_graph
from tests.memory.oracles import measured_peak, sum_of


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)


class _Vmap(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.vmap(lambda row: self.first(row).sin())(x))


class _Grad(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda rows: self.second(self.first(rows).sin()).sum())(x)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


class _OwnFunction(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(_Doubled.apply(x)))


class _Checkpointed(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        options = {"use_reentrant": False, "preserve_rng_state": False}
        return self.second(checkpoint(lambda rows: self.first(rows).sin(), x, **options))


class _Hooked(_Layers):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_hook(lambda module, given, made: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class _Cond(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        def sine(rows: Tensor) -> Tensor:
            return self.first(rows).sin()

        def cosine(rows: Tensor) -> Tensor:
            return self.first(rows).cos()

        return self.second(torch.cond(x.sum() > 0, sine, cosine, (x,)))


class _Scan(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            return 0.5 * state + row, (state + row).clone()

        return self.second(scan(step, x.new_zeros(64), self.first(x))[1])


class _While(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        def goes_on(count: Tensor, rows: Tensor) -> Tensor:
            return count < 3

        def body(count: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, 0.5 * rows

        with torch.no_grad():
            _, rows = while_loop(goes_on, body, (torch.tensor(0), x))
        return self.second(self.first(rows))


@pytest.mark.parametrize("network", [_Vmap, _Grad, _OwnFunction, _Checkpointed, _Hooked])
def test_peak_of_transforms_and_unusual_autograd_leaves(network: type[nn.Module]) -> None:
    module, given = network(), torch.randn(64, 32, requires_grad=True)
    profile = profile_graph(module, given, loss=sum_of)
    given.grad = torch.zeros_like(given)
    assert profile.peak_bytes == pytest.approx(measured_peak(module, given), rel=0.02)


@pytest.mark.slow_cases
@pytest.mark.parametrize("network", [_Cond, _Scan, _While])
def test_control_flow_is_profiled_without_data(network: type[nn.Module]) -> None:
    module, given = network(), torch.randn(64, 32)
    profile = profile_graph(module, given, loss=sum_of)
    assert profile.fwd_flops == 2 * 2 * 64 * 32 * 64
    # Torch's own backward of a branch and of a scan keeps other tensors than plain autograd. That
    # these run at all is seen as well: Dynamo must not remember the run on fake tensors.
    assert profile.peak_bytes == pytest.approx(measured_peak(module, given), rel=0.2)


class _LayerDrop(nn.Module):
    """Layers that a random number of the CPU leaves out, as Hugging Face's BART and OPT have."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.rate or torch.randint(8, (1,)).item() > 6:
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_branch_on_a_random_number_is_profiled(device: str) -> None:
    def count(module: nn.Module) -> int:
        profile = profile_graph(module, torch.ones(2, 8), device=device)  # type: ignore[arg-type]
        return sum(node.op == "linear" for node in profile.nodes)

    modules = [_LayerDrop(0.1), _LayerDrop(0.9)]
    state = torch.get_rng_state()
    assert list(map(count, modules)) == [4, 0]
    assert torch.equal(torch.get_rng_state(), state)
