"""Reports of the matmuls that ran scaled, in a format, or unscaled."""

from __future__ import annotations

import copy
import gc
import logging
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.executed_matmuls import has_torchs_own_kernels
from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.matmuls.coverage import Coverage
from tests.callbacks.modules import Evaluated, Regression
from tests.callbacks.runs import assert_same_run, loader, run, unit_scale_of
from tests.helpers import assert_same_bits


class Recurrent(Regression):
    """A module with a recurrent layer, whose matmuls are inside one kernel."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__(norm=False, dropout=0.0)
        self.recurrent = nn.LSTM(6, hidden, batch_first=True)
        self.readout = nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.recurrent(x[:, None].expand(-1, 3, -1))
        return super().forward(self.readout(steps[:, -1]))


def _warnings(
    make: Callable[[], pl.LightningModule], *callbacks: pl.Callback, **options: Any
) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = run(make, callbacks, **options)
    said = [str(one.message) for one in caught]
    return done, [one for one in said if one.startswith("UnitScaleCallback")]


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.message.startswith("UnitScaleCallback")]


def test_coverage_is_logged_after_first_step(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[int] = []

    class Lines(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            counted.append(len(_lines(caplog)))

    callback = UnitScaleCallback()
    with caplog.at_level(logging.INFO):
        _, warned = _warnings(
            Evaluated,
            callback,
            others=lambda: [Lines()],
            max_steps=4,
            entry_options={"val_dataloaders": loader(4)},
        )
    # Two layers: three matmuls each, but none for the gradient of the batch.
    expected = "UnitScaleCallback: training_step: 5 of 5 matmuls scaled (100 % of their FLOPs)."
    assert _lines(caplog) == [expected]
    assert counted == [1, 1, 1, 1]
    assert warned == []


def test_unscaled_matmuls_warn_once_with_modules() -> None:
    callback = UnitScaleCallback()
    _, warned = _warnings(Recurrent, callback, max_steps=4)
    (warning,) = warned
    assert re.search(r"training_step: 9 of \d+ matmuls scaled \(\d", warning)
    assert "Unscaled matmuls are in recurrent. Expected at least 90%" in warning
    assert warning.endswith("explain() lists all matmuls.")
    assert callback.coverage.uncovered_modules() == ("recurrent",)
    (reason,) = callback.coverage.reasons
    row = next(line for line in callback.explain().splitlines() if line.startswith("recurrent"))
    assert " unscaled " in row and reason in row
    assert {"first", "second", "readout"} <= {one.module for one in callback.coverage.counts}


def test_small_unscaled_fraction_is_logged_without_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mostly(Recurrent):
        """A hundred times as much in layers that have units."""

        def __init__(self) -> None:
            super().__init__(hidden=2)
            self.wide = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 6))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.wide(x))

    with caplog.at_level(logging.INFO):
        _, warned = _warnings(Mostly, UnitScaleCallback(), max_steps=2)
    assert warned == []
    (line,) = _lines(caplog)
    assert re.search(r" matmuls scaled \(9\d\.?\d* % of their FLOPs\); .* % unscaled: ", line)


def test_recurrent_layer_is_bit_identical() -> None:
    with pytest.warns(UserWarning, match="Unscaled matmuls are in recurrent"):
        _, callbacks = assert_same_run(Recurrent, lambda: [UnitScaleCallback()])
    assert unit_scale_of(callbacks).coverage.num_in_units == 9


class _InIntegers(torch.autograd.Function):
    """Multiplies in INT8; its gradients are those of the matmul without rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        scale = torch.cat((x, weight)).abs().max() / 127
        rounded = [(one / scale).round().to(torch.int8) for one in (x, weight)]
        return torch._int_mm(rounded[0], rounded[1].T) * scale**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Quantized(Regression):
    def __init__(self) -> None:
        super().__init__(norm=False)
        self.middle = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(_InIntegers.apply(self.first(x), self.middle))


def test_integer_matmuls_are_reported() -> None:
    with pytest.warns(UserWarning, match="unscaled: a matmul of integers"):
        _, callbacks = assert_same_run(Quantized, lambda: [UnitScaleCallback()])
    (plain,) = [one for one in unit_scale_of(callbacks).coverage.counts if one.kind == "plain"]
    assert (plain.reason, plain.num_matmuls) == ("a matmul of integers", 1)


class Fourier(Regression):
    """Mixes frequencies by a complex matrix."""

    def __init__(self) -> None:
        super().__init__(norm=False, dropout=0.0)
        self.mix = nn.Linear(6, 6, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(torch.fft.fft(x)).real)


@pytest.mark.parametrize("options", [{}, {"simulate": "fp8"}])
def test_complex_matmuls_are_reported(options: dict[str, Any]) -> None:
    callback = UnitScaleCallback(**options)
    _, (warning,) = _warnings(Fourier, callback, max_steps=4)
    # The batch needs no gradient.
    (plain,) = [one for one in callback.coverage.counts if one.kind == "plain"]
    assert (plain.module, plain.reason, plain.num_matmuls) == ("mix", "complex numbers", 2)
    # Four real matmuls in each.
    assert plain.flops == 2 * 4 * (2 * 4 * 6 * 6)
    assert "unscaled: complex numbers. Unscaled matmuls are in mix" in warning


class Widened(Regression):
    """Computes its addend without gradients, by an operator that torch has for CUDA only."""

    def __init__(self) -> None:
        super().__init__(norm=False, dropout=0.0)
        self.scores = nn.Linear(6, 6).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        added = torch.mm(x.bfloat16(), self.scores.weight, out_dtype=torch.float32)
        return super().forward(x + added)


def test_matmuls_with_other_result_dtype_are_reported() -> None:
    def widened(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.bmm(a[None].to(dtype), b[None].to(dtype))[0]

    gc.collect()  # a session of an earlier test would have no kernel of this one
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", widened, "CPU")
    try:
        with pytest.warns(UserWarning, match="unscaled: a matmul whose result has another type"):
            assert_same_run(Widened, lambda: [UnitScaleCallback()])
    finally:
        library._destroy()


def test_step_without_matmuls_has_empty_coverage() -> None:
    class Elementwise(Regression):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2] * self.second.bias

    callback = UnitScaleCallback()
    _, warned = _warnings(Elementwise, callback, max_steps=2)
    assert warned == []
    assert callback.coverage == Coverage() and not callback.gauge
    assert "training_step: no matmul ran" in callback.explain()


def test_explain_has_line_for_every_step() -> None:
    callback = UnitScaleCallback(simulate="fp8")
    assert callback.coverage == Coverage()
    run(Evaluated, [callback], max_steps=4, entry_options={"val_dataloaders": loader(4)})
    lines = callback.explain().splitlines()
    share = "matmuls scaled (100 % of their FLOPs), {} of them in a simulated format (100 %)"
    assert f"training_step: 5 of 5 {share.format(5)}" in lines
    assert f"validation_step: 2 of 2 {share.format(2)}" in lines
    # The property is that of training, whichever ran last.
    assert callback.coverage.num_matmuls == callback.coverage.num_in_units == 5
    for entry, step in (("validate", "validation"), ("test", "test"), ("predict", "predict")):
        alone = UnitScaleCallback()
        run(Evaluated, [alone], entry=entry)
        first = alone.explain().splitlines()[0]
        assert first == f"{step}_step: 2 of 2 matmuls scaled (100 % of their FLOPs)"
        assert alone.coverage.num_matmuls == 2


class Encoder(pl.LightningModule):
    """A module whose layers torch would run in one kernel each in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.into, self.out = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.into(x)[:, None].expand(-1, 3, -1)).mean(1))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def _predicted(callback: pl.Callback | None = None) -> Tensor:
    callbacks = [] if callback is None else [callback]
    return torch.cat(run(Encoder, callbacks, entry="predict").returned)


def _coverage_of_prediction(callback: UnitScaleCallback) -> tuple[Tensor, Coverage]:
    predicted = _predicted(callback)
    # The setting is the user's again.
    assert torch.backends.mha.get_fastpath_enabled()
    return predicted, callback.coverage


def test_rounding_decomposes_fused_layers_in_evaluation() -> None:
    plain = _predicted()
    rounded, coverage = _coverage_of_prediction(UnitScaleCallback(simulate="fp8"))
    # Of each layer: into and out of attention, its two matmuls or the fused one, and two more.
    assert coverage.num_matmuls >= 2 * 5 + 2
    assert coverage.fraction_of_flops("format") == 1.0
    # One part in sixteen for each operand, averaged over the sums.
    error = (rounded - plain).norm() / plain.norm()
    assert 1e-3 < error < 0.1
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        unfused = _predicted(UnitScaleCallback(simulate="fp8"))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert_same_bits(rounded, unfused)


def test_lossless_evaluation_keeps_fused_layers() -> None:
    plain = _predicted()
    callback = UnitScaleCallback()
    with warnings.catch_warnings():
        # Nothing to warn of either: the numbers are the same in units and without.
        warnings.filterwarnings("error", message="UnitScaleCallback")
        found, coverage = _coverage_of_prediction(callback)
    assert_same_bits(found, plain)
    assert coverage.fraction_of_flops("plain") > 0.5


class Orthogonal(torch.optim.SGD):
    """Moves every matrix along its gradient made nearly orthogonal, by matmuls."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.dim() == 2:
                    update = param.grad / (param.grad.norm() + 1e-7)
                    for _ in range(3):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                    param.grad.copy_(update)
        super().step()
        return loss


def _orthogonal(module: nn.Module) -> Any:
    return Orthogonal(module.parameters(), lr=0.05)


class Checked(pl.Callback):
    """Repeats the optimizer's computation outside any step, and compares."""

    def __init__(self) -> None:
        self.copies: list[Any] = []
        self.num_compared = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        twin = copy.deepcopy(list(pl_module.parameters()))
        for param, own in zip(twin, pl_module.parameters(), strict=True):
            param.grad = None if own.grad is None else own.grad.clone()
        self.copies = twin

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not self.copies:
            return
        expected: list[Any] = []

        def elsewhere() -> None:
            Orthogonal(self.copies, lr=0.05).step()
            expected.extend(one.detach() for one in self.copies)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert_same_bits([one.detach() for one in pl_module.parameters()], expected)
        self.num_compared += 1


@pytest.mark.parametrize("options", [{}, {"simulate": "fp8"}, {"simulate": "E2M1FN"}])
def test_matmuls_of_optimizer_are_not_counted(options: dict[str, Any]) -> None:
    callback, checked = UnitScaleCallback(**options), Checked()
    run(lambda: Regression(_orthogonal), [callback], others=lambda: [checked], max_steps=4)
    assert checked.num_compared == 4
    # They are not counted either, and have no units.
    assert callback.coverage.num_matmuls == 5
    assert {one.module for one in callback.coverage.counts} == {"first", "second"}
    assert len(callback.gauge) == 6
    assert has_torchs_own_kernels()


class Multiplying(threading.Thread):
    """Prepares data by matmuls during the training."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        generator = torch.Generator().manual_seed(3)
        self.matrices = torch.randn(2, 32, 32, generator=generator).unbind()
        self.expected = self.matrices[0] @ self.matrices[1]
        self.within_step, self.asked, self.done = (threading.Event() for _ in range(3))
        self.num_equal = self.num_matmuls = 0

    def run(self) -> None:
        while True:
            self.asked.wait()
            self.asked.clear()
            if not self.within_step.is_set():
                return
            self.num_matmuls += 1
            self.num_equal += torch.equal(self.matrices[0] @ self.matrices[1], self.expected)
            self.done.set()


@pytest.mark.parametrize("options", [{"simulate": "fp8"}, {"simulate": "E2M1FN"}])
def test_matmuls_of_data_loading_thread_are_not_counted(options: dict[str, Any]) -> None:
    thread = Multiplying()
    thread.within_step.set()
    thread.start()

    class Loading(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.first(batch[0])
            # In the middle of a step, on another thread.
            thread.asked.set()
            assert thread.done.wait(60)
            thread.done.clear()
            return F.mse_loss(self.second(hidden), batch[1])

    callback = UnitScaleCallback(**options)
    try:
        run(Loading, [callback], max_steps=4)
    finally:
        thread.within_step.clear()
        thread.asked.set()
        thread.join(60)
    assert (thread.num_matmuls, thread.num_equal) == (4, 4)
    assert callback.coverage.num_matmuls == 5 and len(callback.gauge) == 6
