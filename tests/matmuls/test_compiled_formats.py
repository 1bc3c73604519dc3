"""Formats inside the user's torch.compile give the numbers of eager mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch._inductor import config, decomposition
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from benchmarks.executed_matmuls import has_torchs_own_kernels
from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.callbacks.options import Simulate
from lightning_unitscale.matmuls.compiler_internals import compiled_parts, is_by_inductor
from lightning_unitscale.matmuls.coverage import Coverage, CoverageCounter
from lightning_unitscale.matmuls.fp8_linear import FP8Matmuls
from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.matmuls.matmul_formats import FP8Linears, SimulateFormat
from lightning_unitscale.matmuls.rounding import Numerics, SimulatedMatmuls
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from lightning_unitscale.matmuls.units import Units
from tests.helpers import IS_TORCH_2_14, assert_same_bits

pytestmark = pytest.mark.slow  # Inductor compiles C++

Drive = Callable[[nn.Module, AttachedSession], list[Tensor]]


def nearest(**options: Any) -> Numerics:
    return SimulatedMatmuls(SimulateFormat("E4M3FN", "E5M2", **options))


def random() -> Numerics:
    return nearest(rounding="stochastic", grid="moving")


def blocks() -> Numerics:
    options: dict[str, Any] = {"square_weights": True, "hadamard": True}
    return SimulatedMatmuls(
        SimulateFormat("NVFP4", "MXFP8", gradient_rounding="stochastic", **options)
    )


def fp8() -> Numerics:
    return FP8Matmuls(FP8Linears(gradient_format="E4M3FN", in_evaluation=False), True)


class Mlp(nn.Module):
    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.is_checkpointed else self.run(x)

    def run(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Zoo(nn.Module):
    """Convolutions, both kinds of attention, a tied weight, and ops that Inductor decomposes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3, padding=1)
        self.depthwise = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.conv(x)).mT
        heads = self.qkv(x).view(*x.shape[:2], 2, 24).transpose(1, 2)
        q, k, v = heads.chunk(3, -1)
        x = F.scaled_dot_product_attention(q, k, v) + (q @ k.mT).relu() @ v
        x = self.out(x.transpose(1, 2).flatten(2)) @ self.qkv.weight[:16]
        return self.last(x) * (self.out.weight @ self.out.bias)[3] + self.last.weight @ x[0, 0]


class Weights(nn.Module):
    """Linear layers, parameters multiplied by hand, and a matmul of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 32) / 4)
        self.u = nn.Parameter(torch.randn(32, 16) / 4)
        self.linear = nn.Linear(16, 16, bias=False)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.w).relu() @ self.u
        return self.frozen(self.linear(y)) + (y.relu() @ x.mT) @ x


class Steps(nn.Module):
    """The module whose steps run, over a part that is compiled or not."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def step(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()

    def twice(self, x: Tensor) -> Tensor:
        return self.net(self.net(x)).square().mean()


class Blocks(nn.Module):
    """Several modules of one class, which share the compiled code of the first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        blocks: list[Any] = [Mlp() for _ in range(3)]
        if how == "wrapped":
            blocks = [torch.compile(block) for block in blocks]
        elif how == "method":
            for block in blocks:
                block.compile()
        self.blocks = nn.ModuleList(blocks)
        self.is_reentrant: bool | None = None

    def step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.is_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x.square().mean()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    assert has_torchs_own_kernels()
    torch._dynamo.reset()
    counters.clear()
    tables = (dict(decomposition.decompositions), dict(decomposition.fast_random_decomps()))
    with warnings.catch_warnings():
        # Of torch's own, while it compiles.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=".*(num_workers|lr_scheduler|log_every).*")
        yield
    assert config.joint_custom_pre_pass is None
    assert tables == (decomposition.decompositions, decomposition.fast_random_decomps())
    torch._dynamo.reset()


def steps(net: Callable[[], nn.Module], *, dynamic: bool | None = None) -> Callable[[bool], Steps]:
    def make(is_compiled: bool) -> Steps:
        part = net()
        return Steps(torch.compile(part, dynamic=dynamic) if is_compiled else part)

    return make


def inputs(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def taken(module: nn.Module, loss: Tensor) -> list[Tensor]:
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return [loss.detach().clone(), *gradients]


def trained(xs: list[Tensor], name: str = "step") -> Drive:
    def drive(module: nn.Module, attached: AttachedSession) -> list[Tensor]:
        results = []
        for x in xs:
            loss = getattr(module, name)(x)
            loss.backward()
            results += taken(module, loss)
        return results

    return drive


def run(
    module: nn.Module, drive: Drive, numerics: list[Numerics]
) -> tuple[list[Tensor], Coverage, Gauge]:
    names = [name for name in ("step", "twice") if hasattr(module, name)]
    attached = AttachedSession(module, names, Units(), numerics)
    attached.session.counter = CoverageCounter()
    results = drive(module, attached)
    attached.session.units.settle()
    coverage = attached.session.counter.result()
    attached.detach()
    return results, coverage, attached.session.units.gauge


def assert_like_uncompiled(
    make: Callable[[bool], nn.Module],
    drive: Drive,
    numerics: Callable[[], Numerics] = random,
    *,
    has_sums: bool = False,
) -> Coverage:
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        found.append(run(make(is_compiled), drive, [numerics()]))
    (expected, coverage, gauge), (results, compiled_coverage, compiled_gauge) = found
    assert counters["stats"]["unique_graphs"] > 0
    if has_sums:
        # Inductor's own, such as the gradients of biases.
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
    else:
        assert_same_bits(results, expected)
    assert compiled_gauge.pairs == gauge.pairs
    assert set(compiled_coverage.counts) == set(coverage.counts)
    return coverage


def test_rounding_matches_eager() -> None:
    coverage = assert_like_uncompiled(steps(Zoo), trained(inputs(2, 2, 4, 16)), has_sums=True)
    assert {count.kind for count in coverage.counts} == {"format"}


def test_block_rounding_matches_eager() -> None:
    assert_like_uncompiled(steps(Weights), trained(inputs(2, 2, 16, 16)), blocks)


def test_only_linear_layers_run_in_fp8() -> None:
    def drive(module: nn.Module, attached: AttachedSession) -> list[Tensor]:
        results = trained(inputs(2, 2, 16, 16))(module, attached)
        attached.session.numerics[0].is_training = False
        with torch.no_grad():
            return [*results, module.step(inputs(1, 2, 16, 16)[0])]

    coverage = assert_like_uncompiled(steps(Weights), drive, fp8)
    kinds = {(count.module, count.kind) for count in coverage.counts}
    assert kinds >= {("net.linear", "format"), ("net.frozen", "format"), ("net", "units")}


@pytest.mark.parametrize("how", ["wrapped", "method"])
def test_modules_of_same_class_have_separate_names(how: str) -> None:
    def numerics() -> Numerics:
        return nearest(rounding="stochastic", exclude="blocks.1.*")

    coverage = assert_like_uncompiled(
        lambda is_compiled: Blocks(how if is_compiled else ""), trained(inputs(2, 4, 16)), numerics
    )
    assert counters["stats"]["unique_graphs"] == 2  # of the first, whose input has no gradient
    in_units = {count.module for count in coverage.counts if count.kind == "units"}
    assert in_units == {"blocks.1.up", "blocks.1.down"}


def test_module_called_twice_per_step() -> None:
    assert_like_uncompiled(steps(Mlp), trained(inputs(2, 4, 16), "twice"))


def test_dynamic_shapes_match_eager() -> None:
    xs = [x for n in (4, 6, 9) for x in inputs(1, 2, n, 16)]
    assert_like_uncompiled(steps(Weights, dynamic=True), trained(xs), nearest)
    assert counters["stats"]["unique_graphs"] == 1


def test_checkpoint_inside_compiled_module() -> None:
    assert_like_uncompiled(steps(lambda: Mlp(is_checkpointed=True)), trained(inputs(2, 4, 16)))


def test_activation_memory_budget_of_zero() -> None:
    found = []
    with functorch.patch(activation_memory_budget=0.0):
        for is_compiled in (False, True):
            torch.manual_seed(0)
            found.append(run(steps(Mlp)(is_compiled), trained(inputs(2, 4, 16)), [random()])[0])
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoint_around_compiled_module(is_reentrant: bool) -> None:
    results = []
    for how in ("", "wrapped"):
        torch.manual_seed(0)
        module = Blocks(how)
        module.is_reentrant = is_reentrant
        xs = [x.requires_grad_() for x in inputs(2, 4, 16)]
        results.append(run(module, trained(xs), [random()]))
    assert_same_bits(results[1][0], results[0][0])
    assert results[1][2].pairs == results[0][2].pairs
    assert results[1][1].fraction_of_flops("format") == 1.0


def test_backward_pass_uses_units_of_its_forward_pass() -> None:
    def drive(module: nn.Module, attached: AttachedSession) -> list[Tensor]:
        xs, units = inputs(3, 4, 16), attached.session.units
        trained(xs[:1])(module, attached)
        losses = [module.step(x) for x in xs]
        finer = {
            name: GaugePair(pair.log2_sigma + 1, pair.log2_gamma + 1)
            for name, pair in units.gauge.pairs.items()
        }
        units.set_gauge(Gauge(finer))
        for loss in losses:
            loss.backward()
        return taken(module, torch.stack(losses))

    assert_like_uncompiled(steps(Mlp), drive)


def test_compiled_code_is_reused_before_and_after_attachment() -> None:
    module, other = Steps(torch.compile(Mlp())), Steps(nn.Identity())
    drive = trained(inputs(2, 4, 16))
    eager = Steps(module.net._orig_mod)
    plain, rounded = run(eager, drive, [])[0], run(eager, drive, [nearest()])[0]
    assert_same_bits(run(module, drive, [])[0], plain)
    assert_same_bits(run(module, drive, [nearest()])[0], rounded)
    # Graphs with formats, in units alone and without a session.
    results, coverage, _ = run(module, drive, [])
    assert_same_bits(results, plain)
    assert coverage.num_in_units == coverage.num_matmuls == 10
    assert_same_bits(trained(inputs(2, 4, 16))(module, None), plain)
    # Two sessions with one compiled part.
    other.net = module.net
    first = AttachedSession(module, ["step"], Units(), [nearest()])
    assert_same_bits(drive(module, first), rounded)
    assert_same_bits(run(other, drive, [nearest()])[0], rounded)
    assert_same_bits(drive(module, first), rounded)
    first.detach()


def test_other_backend_runs_uncompiled_with_warning() -> None:
    module, drive = Steps(torch.compile(Mlp(), backend="aot_eager")), trained(inputs(1, 4, 16))
    expected = run(Steps(module.net._orig_mod), drive, [nearest()])[0]
    with pytest.warns(UserWarning, match="another backend than Inductor"):
        results, coverage, _ = run(module, drive, [nearest()])
    assert_same_bits(results, expected)
    assert coverage.fraction_of_flops("format") == 1.0
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("options", [{}, {"fullgraph": True, "dynamic": True}], ids=str)
def test_inductor_compiled_modules_are_detected(options: dict[str, Any]) -> None:
    module = Steps(torch.compile(Mlp(), **options))
    module.net._orig_mod.up.compile(**options)
    module.net._orig_mod.down.forward = torch.compiler.disable(Mlp().forward)
    parts = compiled_parts(module)
    assert len(parts) == 2 and all(map(is_by_inductor, parts))
    assert not is_by_inductor(torch.compile(Mlp(), **options, backend="aot_eager"))


def test_compiled_torch_layer_has_units() -> None:
    """Until torch 2.13 Dynamo runs it as it is written, and does not look into its matmuls."""
    module = Steps(Mlp())
    module.net.up.compile()
    coverage = run(module, trained(inputs(1, 4, 16)), [])[1]
    assert counters["frames"]["total"] == int(IS_TORCH_2_14)
    assert coverage.fraction_of_flops("units") == 1.0


def test_module_compiled_after_detach_has_right_gradients() -> None:
    x = inputs(1, 4, 6, 16)[0].mT.contiguous().mT
    run(Steps(torch.compile(Mlp())), trained([x]), [nearest()])
    torch._dynamo.reset()
    module = Mlp()
    torch.compile(module, backend="aot_eager")(x).sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x).sum().backward()
    assert_same_bits(gradients, [p.grad for p in module.parameters()])


class Module(pl.LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.compile(Mlp()) if how == "part" else Mlp()
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.net(batch)).square().mean() * 100

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.head(self.net(batch)).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fitted(
    how: str, simulate: Simulate, epochs: int, folder: Path, **options: Any
) -> tuple[list[Tensor], UnitScaleCallback]:
    callback = UnitScaleCallback(simulate=simulate, recalibrate=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
    )
    module: Any = Module(how)
    model = torch.compile(module) if how == "whole" else module
    trainer.fit(model, DataLoader(inputs(4, 2, 16)), DataLoader(inputs(1, 2, 16)), **options)
    trainer.save_checkpoint(folder / f"{how}.ckpt")
    metrics = [trainer.callback_metrics["loss"].clone()]
    return [*metrics, *[p.detach().clone() for p in module.parameters()]], callback


@pytest.mark.parametrize("how", ["part", "whole"])
def test_fit_and_resumed_fit_match_eager(how: str, tmp_path: Path) -> None:
    simulate = Simulate("fp8", rounding="stochastic")
    expected, uncompiled = fitted("", simulate, 3, tmp_path)
    results, callback = fitted(how, simulate, 3, tmp_path)
    assert_same_bits(results, expected)
    assert callback.gauge.pairs == uncompiled.gauge.pairs
    assert callback.coverage.fraction_of_flops("format") == 1.0
    assert set(callback.coverage.counts) == set(uncompiled.coverage.counts)
    if how == "part":
        fitted(how, simulate, 1, tmp_path)
        resumed, _ = fitted(how, simulate, 3, tmp_path, ckpt_path=tmp_path / "part.ckpt")
        assert_same_bits(resumed, expected)
