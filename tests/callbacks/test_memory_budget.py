import copy
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.gpt import GPT
from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from lightning_unitscale.capture.module_steps import steps_of
from tests.callbacks.modules import Regression
from tests.callbacks.runs import QUIET, MemoryLogger, Rows, loader

pytestmark = pytest.mark.filterwarnings("ignore:RematCallback. training_step is captured in")


def _bytes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(256, (65,), generator=generator)
    return text[:-1], text[1:]


class _GPT(GPT):
    validation_step = pl.LightningModule.validation_step
    test_step = pl.LightningModule.test_step


def _gpt(dropout: float = 0.1) -> GPT:
    torch.manual_seed(0)
    return _GPT(width=64, depth=1, context=64, dropout=dropout, decay_steps=10)


def _batches(count: int = 4) -> DataLoader:
    return DataLoader(Rows(8 * count, _bytes), batch_size=8)


def _fit(module: pl.LightningModule, data: DataLoader, *callbacks: pl.Callback, **options):
    options = {**QUIET, "max_epochs": 1, **options}
    ckpt_path = options.pop("ckpt_path", None)
    trainer = pl.Trainer(callbacks=list(callbacks), **options)
    torch.manual_seed(2)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


def _assert_same_weights(module: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(
        module.state_dict().items(), other.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"precision": "bf16-mixed"},
    ],
    ids=["plain", "accumulated", "mixed precision"],
)
def test_run_within_budget_has_same_weights(options) -> None:
    plain = _gpt()
    _fit(plain, _batches(), RematCallback(1.0), **options)
    planned, callback = _gpt(), RematCallback(0.75)
    _fit(planned, _batches(), callback, **options)
    _assert_same_weights(plain, planned)
    assert callback.reports[0].recomputed_seconds > 0
    assert steps_of(planned) is None


@pytest.mark.slow_cases
@pytest.mark.parametrize("budget", [0.4, 1.0, "min", "min_cut"])
def test_run_without_dropout_matches_plain_run_and_peak(budget) -> None:
    plain, planned = _gpt(dropout=0.0), _gpt(dropout=0.0)
    callback, logger = RematCallback(budget), MemoryLogger()
    _fit(plain, _batches())
    _fit(planned, _batches(), callback, logger=logger)
    _assert_same_weights(plain, planned)
    predicted, measured = callback.predicted_peak_bytes, callback.measured_peak_bytes
    assert predicted is not None and measured is not None
    assert predicted == pytest.approx(measured, rel=0.01)
    logged = logger.rows[-1][1]
    assert logged == {
        "remat/predicted_peak_bytes": predicted,
        "remat/measured_peak_bytes": measured,
    }
    assert "measured" in callback.explain()


def test_measured_peak_of_a_sampled_step_is_not_compared() -> None:
    callback = RematCallback(0.4)
    monitor = ScaleMonitor(every_n_steps=1)
    _fit(_gpt(), _batches(), callback, monitor, logger=MemoryLogger())
    assert "with the statistics of ScaleMonitor" in callback.explain()
    assert "%)" not in callback.explain()


def test_measured_peak_is_within_budget_in_bytes() -> None:
    data, unplanned = DataLoader(_Wide(), batch_size=256), RematCallback(1.0)
    _fit(_Whole(), data, unplanned)
    assert unplanned.measured_peak_bytes is not None
    budget = int(0.8 * unplanned.measured_peak_bytes)
    callback = RematCallback(budget)
    _fit(_Whole(), data, callback)
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes <= 1.005 * budget


def test_budget_below_minimum_error_has_minimum() -> None:
    module = Regression()
    with pytest.raises(ValueError, match=r"smallest achievable peak is .* bytes\), in the"):
        _fit(module, loader(8), RematCallback(10))
    assert steps_of(module) is None


@pytest.mark.slow
def test_resumed_run_has_same_weights(tmp_path: Path) -> None:
    whole = _gpt(dropout=0.0)
    _fit(whole, _batches(), RematCallback(0.75), max_epochs=2)
    first = _gpt(dropout=0.0)
    trainer = _fit(first, _batches(), RematCallback(0.75), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = _gpt(dropout=0.0)
    path = str(tmp_path / "half.ckpt")
    _fit(second, _batches(), RematCallback(0.75), max_epochs=2, ckpt_path=path)
    _assert_same_weights(whole, second)


@pytest.mark.slow
def test_plan_with_unit_scaling_and_monitor() -> None:
    plain, planned = _gpt(dropout=0.0), _gpt(dropout=0.0)
    _fit(plain, _batches())
    monitor = ScaleMonitor(every_n_steps=2)
    callbacks = (RematCallback(0.8), UnitScaleCallback(), monitor)
    _fit(planned, _batches(), *callbacks, logger=MemoryLogger())
    _assert_same_weights(plain, planned)
    assert monitor.snapshots


class _Broken(Regression):
    def training_step(self, batch, batch_idx):
        x = self.first(batch[0]).relu()
        torch._dynamo.graph_break()
        loss = self.second(x).square().mean()
        return loss


def test_relative_budget_applies_to_each_graph() -> None:
    callback = RematCallback(1.0)
    _fit(_Broken(), loader(8), callback)
    assert len(callback.reports) == 2


class _Untrained(Regression):
    def training_step(self, batch, batch_idx):
        x = batch[0].sin()
        torch._dynamo.graph_break()
        return self.second(self.first(x).relu()).square().mean()


def test_warning_for_single_trained_part() -> None:
    with pytest.warns(
        UserWarning, match="captured in several parts, so budget=1.0 applies to the only"
    ):
        _fit(_Untrained(), loader(8), RematCallback(1.0))


class _Parts(Regression):
    """Two graphs with a layer each, and a validation step that breaks as well."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_layers() for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = self.parts[0](batch[0])
        torch._dynamo.graph_break()
        return self.parts[1](x).square().mean()


def _layers() -> nn.Sequential:
    wide = [nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)]
    return nn.Sequential(*wide)


class _Wide(Rows):
    def __init__(self, length: int = 1024) -> None:
        super().__init__(length, lambda generator: (torch.randn(8, generator=generator),))


class _Three(_Parts):
    def __init__(self) -> None:
        super().__init__()
        self.parts.append(_layers())

    def training_step(self, batch, batch_idx):
        x = self.parts[0](batch[0])
        torch._dynamo.graph_break()
        x = self.parts[1](x)
        torch._dynamo.graph_break()
        return self.parts[2](x).square().mean()


@pytest.mark.slow
def test_peak_includes_memory_of_other_graphs() -> None:
    torch.manual_seed(0)
    callback = RematCallback(1.0)
    _fit(_Three(), DataLoader(_Wide(), batch_size=256), callback)
    assert len(callback.reports) == 3
    assert callback.predicted_peak_bytes == pytest.approx(callback.measured_peak_bytes, rel=0.005)


class _Whole(_Parts):
    def training_step(self, batch, batch_idx):
        return self.parts[1](self.parts[0](batch[0])).square().mean()


class _Manual(_Whole):
    """Unit scaling measures its first step while it runs, op by op and without a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_manual_step_is_planned_with_unit_scaling(order) -> None:
    results = []
    remat = RematCallback(0.8)
    for callbacks in ([], [UnitScaleCallback(), remat][::order]):
        torch.manual_seed(0)
        results.append(_Manual())
        _fit(results[-1], DataLoader(_Wide(), batch_size=256), *callbacks)
    _assert_same_weights(*results)
    assert remat.reports


class _Validated(Regression):
    def validation_step(self, batch, batch_idx):
        torch._dynamo.graph_break()


@pytest.mark.slow
def test_graph_break_in_other_step_allows_budget_in_bytes() -> None:
    module, callback = _Validated(dropout=0.0), RematCallback("1GiB")
    trainer = pl.Trainer(callbacks=[callback], max_epochs=1, **QUIET)
    trainer.fit(module, loader(8), loader(8))
    assert len(callback.reports) == 1


@pytest.mark.slow
def test_smaller_last_batch_has_separate_plan() -> None:
    data = DataLoader(_Wide(1024 + 40), batch_size=256)
    torch.manual_seed(0)
    plain = _Whole()
    planned = copy.deepcopy(plain)
    _fit(plain, data)
    callback = RematCallback(0.7)
    _fit(planned, data, callback)
    _assert_same_weights(plain, planned)
    large, small = callback.reports
    assert small.peak_bytes < large.peak_bytes == callback.predicted_peak_bytes


class _Looping(Regression):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in (self.first, self.second):
            x = layer(x)
            torch._dynamo.graph_break()
        return x.square().mean()


def test_uncaptured_step_runs_without_plan() -> None:
    plain, planned, callback = _Looping(), _Looping(), RematCallback(0.8)
    planned.load_state_dict(plain.state_dict())
    _fit(plain, loader(8))
    with pytest.warns(UserWarning, match=r"_Looping.* without a plan: budget=0.8 may not hold"):
        _fit(planned, loader(8), callback)
    _assert_same_weights(plain, planned)
    assert "Nothing is planned: " in callback.explain()
    assert steps_of(planned) is None


class _Doubled(torch.autograd.Function):
    """An exponential whose gradient the user makes twice as large."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return 2 * grad * y


class _Custom(_Parts):
    def training_step(self, batch, batch_idx):
        return self.parts[1](_Doubled.apply(self.parts[0](batch[0]))).square().mean()


@pytest.mark.slow_cases
@pytest.mark.parametrize("budget", [0.7, "min_cut"])
def test_custom_autograd_function_keeps_its_gradient(budget) -> None:
    data = DataLoader(_Wide(), batch_size=256)
    torch.manual_seed(0)
    plain = _Custom()
    planned = copy.deepcopy(plain)
    _fit(plain, data)
    callback = RematCallback(budget)
    _fit(planned, data, callback)
    _assert_same_weights(plain, planned)
    assert callback.reports[0].recomputed


class _Chosen(_Parts):
    """Rows whose number depends on their values."""

    def training_step(self, batch, batch_idx):
        x = self.parts[0](batch[0])
        return self.parts[1](x[x.sum(-1) > 0]).square().mean()


@pytest.mark.slow
def test_shapes_that_depend_on_values_are_planned_in_parts() -> None:
    data = DataLoader(_Wide(), batch_size=256)
    torch.manual_seed(0)
    plain = _Chosen()
    planned = copy.deepcopy(plain)
    _fit(plain, data)
    callback = RematCallback("min_cut")
    _fit(planned, data, callback)
    _assert_same_weights(plain, planned)
    assert len(callback.reports) >= 2


@pytest.mark.slow
def test_budget_in_bytes_with_graph_break_is_an_error() -> None:
    with pytest.raises(ValueError, match="breaks into several graphs"):
        _fit(_Broken(), loader(8), RematCallback("1GiB"))


@pytest.mark.parametrize(
    "budget", ["a lot", 1.5, -0.1, float("nan"), -3, 0, True, "0 MiB", "minimum"]
)
def test_malformed_budget_is_an_error(budget) -> None:
    with pytest.raises(ValueError, match=r"budget=.*: not .*\. Expected bytes .*\. Pass ") as error:
        RematCallback(budget)
    assert "a float from 0.0 (the smallest peak" in str(error.value)


def test_two_remat_callbacks_are_an_error() -> None:
    with pytest.raises(MisconfigurationException, match="2 times"):
        _fit(_gpt(), _batches(), RematCallback(0.9), RematCallback(0.9))


@pytest.mark.slow
def test_inductor_runs_the_plan(torch_kernels: None) -> None:
    torch.manual_seed(0)
    plain = Regression(dropout=0.0, norm=False)
    planned = copy.deepcopy(plain)
    _fit(plain, loader(8), RematCallback(1.0, compile=True))
    callback = RematCallback("min_cut", compile=True)
    _fit(planned, loader(8), callback)
    assert callback.reports
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class _Lengths(pl.LightningModule):
    """Attention over sequences whose lengths change from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 32)

    def training_step(self, batch, batch_idx):
        logits = self.head(self.encoder(self.embedding(batch[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _sequences(*lengths: int) -> DataLoader:
    return DataLoader([torch.randint(32, (4, length)) for length in lengths], batch_size=None)


@pytest.mark.slow
def test_variable_length_batches_share_plan() -> None:
    data = _sequences(20, 31, 17, 40, 25, 64, 12, 33, 52, 28)
    plain = _Lengths()
    planned, callback = copy.deepcopy(plain), RematCallback(0.9)
    _fit(plain, data)
    _fit(planned, data, callback)
    _assert_same_weights(plain, planned)
    assert [report.sizes for report in callback.reports] == [(), (31,)]
    assert "for the planned sizes" in callback.explain().splitlines()[-1]


class _FeedForward(_Lengths):
    """A network without attention, which is planned in a third of the time."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)]
        self.encoder = nn.Sequential(*layers)


@pytest.mark.slow
def test_longer_batches_are_replanned_within_budget() -> None:
    unplanned = RematCallback(1.0)
    _fit(_FeedForward(), _sequences(200, 200, 200), unplanned)
    torch._dynamo.reset()
    assert unplanned.measured_peak_bytes is not None
    callback = RematCallback(int(0.85 * unplanned.measured_peak_bytes))
    _fit(_FeedForward(), _sequences(12, 16, 200, 18, 200, 15), callback)
    # The plan of the short batches would keep too much of the long ones.
    assert [report.sizes for report in callback.reports] == [(), (16,), (200,)]
    assert callback.predicted_peak_bytes is not None
    assert callback.predicted_peak_bytes <= 0.85 * unplanned.measured_peak_bytes


class _Unrolled(_Lengths):
    def training_step(self, batch, batch_idx):
        state = self.embedding(batch[:, 0])
        for position in range(1, batch.shape[1]):
            state = torch.tanh(state + self.embedding(batch[:, position]))
        return self.head(state).square().mean()


@pytest.mark.slow
def test_repeated_planning_warns() -> None:
    with pytest.warns(UserWarning, match="captured and planned in 5 steps.*recompiles"):
        _fit(_Unrolled(), _sequences(5, 8, 4, 6, 9, 7), RematCallback(1.0))
