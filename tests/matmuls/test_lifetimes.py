"""Kernels are overridden exactly as long as a transformed module or its graph lives."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.executed_matmuls import has_torchs_own_kernels
from lightning_unitscale import UnitScaleCallback, attach
from lightning_unitscale.capture.module_steps import matmuls_of, steps_of
from lightning_unitscale.matmuls.calls import CALLS
from lightning_unitscale.matmuls.kernels import num_overridden
from lightning_unitscale.matmuls.session import MatmulSession
from lightning_unitscale.quantize import quantize
from lightning_unitscale.transforms import (
    compile,
    fp8_linears,
    lossless_unit_scale,
    simulate_format,
    simulate_fp8,
)
from tests.helpers import assert_same_bits, captured_copy, run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(F.gelu(self.up(x))) * 1e-3).square().mean()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "lossless": lossless_unit_scale,
    "simulated": lambda module, _: simulate_fp8(module),
    "fp8": lambda module, _: fp8_linears(module),
}
EACH = pytest.mark.parametrize("name", TRANSFORMS)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    assert has_torchs_own_kernels()
    gc.freeze()  # each collection would go through what other tests have left
    yield
    torch._dynamo.reset()
    assert has_torchs_own_kernels()


@EACH
def test_kernels_are_overridden_while_module_is_alive(name: str) -> None:
    first = TRANSFORMS[name](Net(), torch.randn(4, 16))
    second = copy.deepcopy(first)
    assert num_overridden() > 0
    del first
    gc.collect()
    assert num_overridden() > 0
    second(torch.randn(4, 16)).backward()
    del second
    assert has_torchs_own_kernels()


@EACH
def test_failed_call_restores_kernels(name: str) -> None:
    module = TRANSFORMS[name](Net(), torch.randn(4, 16))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.randn(4, 3))
    assert_same_bits(torch.ones(2, 3) @ torch.ones(3, 2), torch.full((2, 2), 3.0))
    x = torch.randn(4, 16)
    assert_same_bits(run(module, x)["output"], run(module, x)["output"])


def test_failed_example_restores_kernels() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        lossless_unit_scale(Net(), torch.randn(4, 3))


def test_backward_pass_after_module_is_deleted() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    layer = nn.Linear(16, 8)
    weight = layer.weight.detach().clone()
    y = simulate_fp8(layer)(x)
    del layer
    gc.collect()
    gradient = torch.randn(4, 8)
    y.backward(gradient)
    expected = quantize(gradient, "E5M2") @ quantize(weight, "E4M3FN")
    torch.testing.assert_close(x.grad, expected)


def test_backward_pass_after_session_ended_is_unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another module may keep kernels overridden, and the graph may have run before."""
    module, x = Net(), torch.randn(4, 16)
    expected = run(module, x)["parameters"]
    module.zero_grad()
    with attach(Net(), callbacks=UnitScaleCallback()):
        with attach(module, callbacks=UnitScaleCallback()):
            loss = module(x)
            loss.backward(retain_graph=True)
            module.zero_grad()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        ran: list[MatmulSession] = []
        monkeypatch.setattr(MatmulSession, "run", lambda session, *_: ran.append(session))
        loss.backward()
    assert not ran
    assert_same_bits({name: p.grad for name, p in module.named_parameters()}, expected)


def test_matmul_records_are_freed_with_graph() -> None:
    module, x = Net(), torch.randn(4, 16)
    with attach(module, callbacks=UnitScaleCallback()):
        before = len(CALLS)
        loss = module(x)
        assert len(CALLS) == before + 2
        loss.backward()
        assert len(CALLS) == before
        torch.optim.SGD(module.parameters(), lr=0.1).step()


def test_module_that_stores_its_output_is_collected() -> None:
    class Keeps(Net):
        last: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    simulate_fp8(Keeps())(torch.randn(4, 16))


def test_code_that_calls_matmuls_is_collected() -> None:
    """All that Dynamo compiles of a function lives as long as the code that it makes of it."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return (x @ self.up.weight.t()).square().mean()

    code = weakref.ref(own := forward.__code__.replace())
    net = type("Own", (Net,), {"forward": FunctionType(own, globals())})()
    x = torch.randn(4, 16)
    module = lossless_unit_scale(net, x)
    for _ in range(4):  # the steps after the first two find what was noted
        module(x).backward()
    del own, net, module
    gc.collect()
    assert code() is None


@pytest.mark.parametrize("first", TRANSFORMS)
@pytest.mark.parametrize("second", TRANSFORMS)
def test_transforms_commute(first: str, second: str) -> None:
    net, x = Net(), torch.randn(4, 16)
    both = TRANSFORMS[second](TRANSFORMS[first](net, x), x)
    other = TRANSFORMS[first](TRANSFORMS[second](net, x), x)
    assert_same_bits(run(both, x), run(other, x))
    assert steps_of(both) is None
    matmuls = matmuls_of(both)
    assert matmuls is not None
    assert matmuls.session.units.is_used == ("lossless" in (first, second))


def test_formats_without_units_round_unscaled_values() -> None:
    layer, x = nn.Linear(16, 8, bias=False), torch.randn(4, 16) * 1e-3
    expected = F.linear(quantize(x, "E4M3FN"), quantize(layer.weight.detach(), "E4M3FN"))
    simulated = simulate_fp8(layer)
    for _ in range(2):
        assert_same_bits(simulated(x).detach(), expected)
    assert "units" not in simulated.explain()  # type: ignore[operator]
    in_units = lossless_unit_scale(simulated, x)
    exact = layer(x)
    assert (in_units(x) - exact).norm() < 0.5 * (expected - exact).norm()


def test_each_layer_has_its_own_format() -> None:
    net, x = Net(), torch.randn(4, 16)
    both = simulate_format(
        simulate_format(net, "E4M3FN", "E5M2", include="up"), "E2M1FN", "E2M1FN", include="down"
    )
    hidden = F.linear(
        quantize(x, "E4M3FN"), quantize(net.up.weight.detach(), "E4M3FN"), net.up.bias
    )
    hidden = quantize(F.gelu(hidden).detach(), "E2M1FN")
    output = F.linear(hidden, quantize(net.down.weight.detach(), "E2M1FN"), net.down.bias)
    assert_same_bits(both(x).detach(), (output * 1e-3).square().mean().detach())


def test_copies_are_transformed_independently() -> None:
    net, x = Net(), torch.randn(4, 16)
    scaled = lossless_unit_scale(net, x)
    twin = copy.deepcopy(scaled)
    assert twin.gauge() == scaled.gauge() and len(twin.gauge()) == 6  # type: ignore[operator]
    assert_same_bits(run(twin, x), run(net, x))
    assert "6 of 6" not in scaled.explain()  # type: ignore[operator]
    assert "5 of 5 matmuls scaled" in twin.explain()  # type: ignore[operator]
    with torch.no_grad():
        twin.up.weight.mul_(2.0)
    assert not torch.equal(twin(x), scaled(x))
    assert_same_bits(run(scaled, x), run(net, x))


def test_pickling_transformed_module_is_an_error() -> None:
    scaled = lossless_unit_scale(Net(), torch.randn(4, 16))
    with pytest.raises(TypeError, match=r"Net: its matmuls are scaled .* Save its state_dict"):
        pickle.dumps(scaled)


def test_example_with_autograd_history() -> None:
    net = Net()
    x = torch.randn(4, 16, requires_grad=True) * 2
    scaled = lossless_unit_scale(net, x)
    assert x.grad_fn is not None
    assert scaled.gauge()["down.linear"].log2_gamma < -5  # type: ignore[operator]
    leaf = torch.randn(4, 16)
    assert_same_bits(run(scaled, leaf), run(net, leaf))


def test_lazy_parameters_are_initialized_in_first_call() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.LazyLinear(32), nn.LazyLinear(16)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.down(self.up(x)), 0.5).square().mean()

    plain, x = Lazy(), torch.randn(4, 16)
    scaled = lossless_unit_scale(plain, x)
    assert isinstance(scaled.up.weight, nn.UninitializedParameter)
    losses = []
    for module in (plain, scaled):
        torch.manual_seed(3)
        loss = module(x)
        loss.backward()
        losses.append([loss, *(param.grad for param in module.parameters())])
    assert_same_bits(losses[0], losses[1])
    assert_same_bits(dict(plain.state_dict()), dict(scaled.state_dict()))


def test_example_runs_once_and_restores_random_state() -> None:
    import random

    class Counts(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            CALLS_SO_FAR.append(random.random())
            return F.dropout(super().forward(x)[None], 0.5).sum()

    random.seed(3)
    state = torch.get_rng_state()
    net = Counts()
    scaled = lossless_unit_scale(net, torch.randn(4, 16).zero_())
    # Code outside the module has seen the call, so the call cannot be undone.
    assert len(CALLS_SO_FAR) == 1
    assert net.calls == scaled.calls == 0
    first = random.random()
    random.seed(3)
    assert random.random() == first
    torch.set_rng_state(state)


CALLS_SO_FAR: list[float] = []


def test_captured_module_inherits_units() -> None:
    net, x = Net(), torch.randn(4, 16)
    scaled = lossless_unit_scale(net, x)
    for captured in (compile(scaled), captured_copy(scaled)):
        assert steps_of(captured) is not None
        assert captured.gauge() == scaled.gauge()  # type: ignore[operator]
    captured = captured_copy(scaled)
    assert_same_bits(run(captured, x), run(net, x))
    assert captured.gauge() == scaled.gauge()  # type: ignore[operator]


def test_captured_module_has_same_matmul_names() -> None:
    class Einsum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4) * 50)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,io->bo", x, self.weight).square().mean()

    module, x = Einsum(), torch.randn(6, 8)
    scaled = lossless_unit_scale(module, x)
    captured = captured_copy(scaled)
    assert_same_bits(run(captured, x), run(module, x))
    assert captured.gauge() == scaled.gauge()  # type: ignore[operator]
    assert any(pair.log2_sigma == 6 for pair in captured.gauge().values())  # type: ignore[operator]


def test_checkpoint_recomputes_same_stochastic_rounding() -> None:
    """With stochastic rounding, recomputed values are those of the first time."""

    class Blocks(nn.Module):
        def __init__(self, checkpoints: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.checkpoints = checkpoints

        def block(self, x: Tensor) -> Tensor:
            return F.gelu(self.layer(F.gelu(x)) @ self.layer.weight)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                if self.checkpoints:
                    x = checkpoint(self.block, x, use_reentrant=False)
                else:
                    x = self.block(x)
            return x.square().mean()

    plain, x = Blocks(False), torch.randn(4, 16, requires_grad=True)
    other = Blocks(True)
    other.load_state_dict(plain.state_dict())
    results = [
        run(simulate_format(module, "E3M2FN", "E4M3FN", rounding="stochastic"), x)
        for module in (plain, other)
    ]
    assert_same_bits(*results)


def test_transformed_module_inside_torch_compile() -> None:
    layer, x = nn.Linear(16, 8), torch.randn(4, 16)
    simulated = simulate_fp8(layer)
    compiled = torch.compile(lambda x: simulated(x * 2) + 1, backend="eager")
    expected = simulated(x * 2) + 1
    assert_same_bits(compiled(x).detach(), expected.detach())
    assert not torch.equal(expected, layer(x * 2) + 1)
    scaled = lossless_unit_scale(layer, x)
    compiled = torch.compile(scaled, backend="eager")
    assert_same_bits(compiled(x).detach(), layer(x).detach())
    assert "1 of 1 matmuls scaled" in scaled.explain()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Leave out\s+fullgraph=True"):
        torch.compile(scaled, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("backend", ["inductor", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_torch_compile_compiles_scaled_matmuls(backend: str) -> None:
    net, x = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)), torch.randn(4, 16) * 9
    compiled = torch.compile(net, backend=backend)
    scaled = lossless_unit_scale(net, x)
    compiled_scaled = torch.compile(scaled, backend=backend)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        assert_same_bits(run(compiled_scaled, x), run(compiled, x))
    # One graph each, whose matmuls are scaled in both passes.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 2
    assert "5 of 5 matmuls scaled" in scaled.explain()


def test_transformed_lightning_module_trains_bit_identically() -> None:
    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1.0)

    plain, x = Regression(), torch.randn(4, 16)
    scaled = lossless_unit_scale(plain, x)
    for module in (plain, scaled):
        trainer = pl.Trainer(
            max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, barebones=False,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(x, 2, num_workers=0)
        trainer.fit(module, loader)
    assert_same_bits(dict(plain.state_dict()), dict(scaled.state_dict()))
    assert "matmuls scaled" in scaled.explain()  # type: ignore[operator]
