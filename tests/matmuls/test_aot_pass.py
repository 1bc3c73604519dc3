"""Modules that the user compiled: units around the matmuls inside the user's torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.utils.data import DataLoader

from benchmarks.executed_matmuls import has_torchs_own_kernels
from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.matmuls.compiled_graphs import GRAPHS
from lightning_unitscale.matmuls.compiler_internals import InductorPass
from lightning_unitscale.matmuls.coverage import CoverageCounter
from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from lightning_unitscale.matmuls.torch_internals import Kernel, KernelOverrides

pytestmark = pytest.mark.slow  # Inductor compiles C++


class Net(nn.Module):
    """A convolution, attention, linear layers with and without bias, a matmul of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu().mT * 30
        heads = self.qkv(x).view(*x.shape[:2], 2, 12).transpose(1, 2)
        x = F.scaled_dot_product_attention(*heads.chunk(3, -1)).transpose(1, 2).flatten(2)
        # A weight read twice, whose gradient Inductor adds up within a matmul.
        tied = self.qkv.weight[:8] @ self.qkv.weight[8:16].mT
        return self.out(x) + (x @ x.mT * 1e-3) @ x + tied.sum()


class Module(pl.LightningModule):
    def __init__(self, how: str = "", net: Callable[[], nn.Module] = Net) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.compile(net()) if how == "submodule" else net()
        self.head = nn.Linear(8, 3)
        if how == "method":
            self.net.compile()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.head(self.net(batch)).square().mean() * 100
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.compile(nn.Linear(16, 16, bias=False))

    def step(self, x: Tensor) -> Tensor:
        return (self.net(x) * 1000).square().mean()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    assert has_torchs_own_kernels()
    torch._dynamo.reset()
    counters.clear()
    GRAPHS.clear()
    with warnings.catch_warnings():
        # Of torch's own, while it compiles.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=".*(num_workers|lr_scheduler|log_every).*")
        yield
    assert config.post_grad_custom_pre_pass is config.post_grad_custom_post_pass is None
    torch._dynamo.reset()


def batches(count: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(4, 16, generator=generator) for _ in range(2 * count)]
    return DataLoader(data, batch_size=2)


def small() -> nn.Module:
    """Little C++ to compile."""
    return nn.Linear(16, 8)


def fitted(how: str, *callbacks: pl.Callback, steps: int = 4) -> Module:
    module = Module("", small) if how == "whole" else Module(how)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(torch.compile(module) if how == "whole" else module, batches(steps))
    return module


def same(first: Module, second: Module) -> bool:
    tensors = zip(
        (*first.losses, *first.parameters()), (*second.losses, *second.parameters()), strict=True
    )
    return all(torch.equal(a, b) for a, b in tensors)


NET = {"net.conv.conv1d", "net.qkv.linear", "net.out.linear", "net.linear"}
NET |= {"net.matmul", "net.matmul_1", "net.scaled_dot_product_attention"}


@pytest.mark.parametrize(
    ("how", "num_matmuls", "names"),
    [("submodule", 22, NET), ("method", 22, NET), ("whole", 5, {"net.linear"})],
)
def test_user_compiled_module_is_bit_identical(
    how: str, num_matmuls: int, names: set[str], request: pytest.FixtureRequest
) -> None:
    if how != "whole":
        request.getfixturevalue("torch_kernels")
    plain = fitted(how)
    num_graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    callback = UnitScaleCallback(recalibrate=1)
    scaled = fitted(how, callback)
    assert same(plain, scaled)
    # New units at every step, and nothing compiled again.
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert callback.coverage.num_matmuls == callback.coverage.num_in_units == num_matmuls
    assert not callback.coverage.uncovered_modules()
    pairs = callback.gauge.pairs
    assert {name for name in pairs if ":" not in name} == names | {"head.linear"}
    if how != "whole":
        assert pairs["net.qkv.linear:input"].log2_sigma > 2
        assert pairs["net.conv.conv1d"].log2_gamma != 0
    # Afterwards the compiled graphs compute as if nothing had been.
    assert GRAPHS
    for graph in GRAPHS.values():
        assert (graph.factors(torch.device("cpu"), is_backward=False) == 1).all()


def test_new_units_change_compiled_operands_in_place() -> None:
    read: list[Tensor] = []

    def reading(original: Kernel) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            read[:] = [arg.clone() for arg in args]
            return original(*args, **kwargs)

        return kernel

    overrides = KernelOverrides("CPU")
    overrides.put("mm.out", reading)
    module, x = Linear(), torch.randn(8, 16)
    attached = AttachedSession(module, ["step"])
    results = []
    for exponent in (0, 3, -5):
        pair = GaugePair(log2_sigma=exponent)
        name = "net.linear"
        gauge = {f"{name}:input": pair, f"{name}:weight": GaugePair(log2_sigma=1)}
        attached.session.units.set_gauge(Gauge(gauge | {name: GaugePair(log2_gamma=exponent)}))
        loss = module.step(x)
        assert torch.equal(read[0], x * 2.0**-exponent)
        loss.backward()
        results.append((loss.detach(), *[p.grad.clone() for p in module.parameters()]))
        module.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))
    attached.detach()
    # Compiled code stays correct, and another run of the same module continues with it.
    assert torch.equal(module.step(x).detach(), results[0][0])
    assert torch.equal(read[0], x)
    again = AttachedSession(module, ["step"])
    module.step(x)
    again.session.units.settle()
    module.step(x)
    assert again.session.units.gauge.pairs["net.linear:weight"].log2_sigma == -3
    assert counters["stats"]["unique_graphs"] == 1
    again.detach()
    overrides.remove()


def test_module_compiled_before_is_recompiled_with_units() -> None:
    module, x = Linear(), torch.randn(8, 16)
    expected = module.step(x)
    attached = AttachedSession(module, ["step"])
    counter = attached.session.counter = CoverageCounter()
    # The plain graph is in Inductor's cache by now; it is not taken for ours, nor ours for it.
    assert torch.equal(module.step(x), expected)
    assert (counter.result().num_in_units, counter.result().num_matmuls) == (1, 1)
    assert len(GRAPHS) == 1
    attached.detach()
    torch._dynamo.reset()
    GRAPHS.clear()
    assert torch.equal(module.step(x), expected)
    assert not GRAPHS


def test_user_inductor_pass_runs_and_is_restored() -> None:
    seen: list[fx.Graph] = []
    with config.patch(post_grad_custom_pre_pass=seen.append):
        before = config.post_grad_custom_pre_pass
        module = Linear()
        attached = AttachedSession(module, ["step"])
        module.step(torch.randn(8, 16))
        attached.detach()
        assert config.post_grad_custom_pre_pass is before
    assert len(seen) == 1


def test_reinstalled_inductor_pass_runs_once() -> None:
    graphs: list[fx.Graph] = []
    graph_pass = InductorPass("post_grad_custom_pre_pass", graphs.append)
    graph_pass.install()
    with config.patch(post_grad_custom_pre_pass=None):
        graph_pass.remove()
    graph_pass.install()
    graph_pass(fx.Graph())
    graph_pass.remove()
    # Another pass may hold it for longer.
    graph_pass(fx.Graph())
    assert len(graphs) == 1


def test_inductor_config_can_be_copied_while_attached() -> None:
    attached = AttachedSession(Linear(), ["step"])
    copied = config.get_config_copy()  # as for torch.scan
    assert isinstance(copied["joint_custom_post_pass"], InductorPass)
    attached.detach()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_units_keep_their_address_in_every_compile_mode(mode: str, torch_kernels: None) -> None:
    """A recorded CUDA graph is replayed unchanged with new units."""
    compiled: list[tuple[bool, bool]] = []

    def note(graph: fx.Graph) -> None:
        compiled.append((config.triton.cudagraphs, config.max_autotune))

    module, x = Linear(), torch.randn(8, 16)
    module.net = torch.compile(nn.Linear(16, 16, bias=False), mode=mode)
    with config.patch(post_grad_custom_pre_pass=note):
        attached = AttachedSession(module, ["step"])
        seen: list[list[tuple[int, list[float]]]] = []
        for exponent in (2, -3, 7):
            pair = GaugePair(log2_sigma=exponent)
            gauge = {"net.linear:input": pair, "net.linear:weight": GaugePair(log2_sigma=1)}
            gamma = {"net.linear": GaugePair(log2_gamma=exponent)}
            attached.session.units.set_gauge(Gauge(gauge | gamma))
            module.step(x).backward()
            kept = [graph._factors[attached.session].values() for graph in GRAPHS.values()]
            tensors = [one.on(torch.device("cpu")) for of_graph in kept for one in of_graph]
            seen.append([(tensor.data_ptr(), tensor.tolist()) for tensor in tensors])
        attached.detach()
    # A forward and a backward graph, compiled once, as the user has asked for.
    assert compiled == [(mode == "reduce-overhead", mode != "reduce-overhead")] * 2
    assert counters["stats"]["unique_graphs"] == 1
    for of_graph in zip(*seen, strict=True):
        addresses, factors = zip(*of_graph, strict=True)
        assert len(set(addresses)) == 1
        assert len(set(map(tuple, factors))) == 3
