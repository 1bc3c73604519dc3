"""Every matmul outside its low-precision format is counted, and a warning reports it."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_unitscale import FP8, UnitScaleCallback
from lightning_unitscale.capture import dynamo_capture as capture
from tests.callbacks.runs import QUIET, Capturing


class Net(pl.LightningModule):
    """Two layers that FP8 supports; the cases add the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Seen(pl.Callback):
    """Keeps the loss and the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.steps.append([outputs["loss"], *(gradient.clone() for gradient in gradients)])


def batches(*rows: int) -> list[Tensor]:
    return [
        torch.randn(n, 32, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(rows)
    ]


def fit(
    module: pl.LightningModule, data: list[Tensor], *callbacks: pl.Callback, **options: Any
) -> tuple[list[list[Tensor]], list[str]]:
    """Train; returns loss and gradients of each step, and the warnings of this package."""
    seen = Seen()
    trainer = pl.Trainer(callbacks=[*callbacks, seen], max_epochs=1, **{**QUIET, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size=None))
    texts = [str(one.message) for one in caught]
    return seen.steps, [text for text in texts if text.startswith("UnitScaleCallback")]


def _are_rounded(steps: list[list[Tensor]], plain: list[list[Tensor]]) -> list[bool]:
    """Check for each step that its loss and all gradients of matrices have changed."""
    return [
        all(
            not torch.equal(one, other)
            for one, other in zip(step, others, strict=True)
            if one.dim() != 1
        )
        for step, others in zip(steps, plain, strict=True)
    ]


class Decorated(Net):
    forward = torch.compile(Net.forward, dynamic=False)


@torch.compile(dynamic=False)
def _feed_forward(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    return down(up(x).relu())


class ByFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        return _feed_forward(x, self.up, self.down)


class ByPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.compile(self.up, dynamic=False)
        self.run = torch.compile(self.both, dynamic=False)

    def both(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Broken(Net):
    """The first layer is compiled, the second one runs after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x.relu())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"simulate": "fp8"}], ids=str)
@pytest.mark.parametrize("make", [Decorated, ByFunction, ByPart, Broken])
@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_compiled_module_past_recompile_limit_is_rounded(
    make: type[Net], options: dict[str, Any], is_compiled_before: bool
) -> None:
    torch._dynamo.reset()
    data = batches(*range(4, 16))
    plain, _ = fit(Net(), data)
    module = make()
    if is_compiled_before:
        module.training_step(data[0], 0).backward()
        module.zero_grad()
    callback = UnitScaleCallback(**options)
    steps, warned = fit(module, data, callback)
    assert all(_are_rounded(steps, plain))
    assert callback.coverage.fraction_of_flops("format") == 1.0 and warned == []
    torch._dynamo.reset()


class Narrow(Net):
    """A layer of 24 features, from a step on."""

    starts = 0

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.narrow(x) if self.global_step >= self.starts else x


class LateNarrow(Narrow):
    starts = 3


_NARROW = "narrow (its 24 output features are not a multiple of 16, and padding would not pay)"


def test_unsupported_shape_warns_in_first_step() -> None:
    callback = UnitScaleCallback(precision="fp8")
    (warning,) = fit(Narrow(), batches(4, 4), callback)[1]
    assert "precision='fp8': 3 of 8 matmuls (" in warning
    assert warning.endswith(f" run outside FP8: {_NARROW}")
    assert callback.coverage.num_in_format == 5


def test_warning_separates_unscaled_from_unrounded_matmuls() -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(super().forward(x)[None])[0]

    (warning,) = fit(Recurrent(), batches(4, 4), UnitScaleCallback(simulate="fp8"))[1]
    assert re.search(r"run outside .*: rnn \(.*\)\. \d of \d matmuls scaled", warning)


def test_falling_coverage_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = UnitScaleCallback(precision="fp8")
    with caplog.at_level(logging.INFO):
        (warning,) = fit(LateNarrow(), batches(4, 4, 4, 4, 3, 4), callback)[1]
    pattern = r"coverage by FP8 went from 100 % to 76.9 % of the FLOPs at step 3: 3 of 8 matmuls"
    assert re.search(pattern, warning) and _NARROW in warning
    lines = [one.message for one in caplog.records if " matmuls scaled " in one.message]
    assert len(lines) == 2 and "outside FP8: its 24 output features" in lines[1]
    assert callback.coverage.num_in_format == 5
    assert "outside FP8: its 24 output features" in callback.explain()


def test_unsupported_shape_in_one_step_is_reported() -> None:
    """Decided by the weight that a step reads, not by the first one."""

    class Sliced(Net):
        def forward(self, x: Tensor) -> Tensor:
            rows = 40 if self.global_step == 2 else 48
            hidden = F.linear(x, self.up.weight[:rows], self.up.bias[:rows])
            return F.linear(hidden.relu(), self.down.weight[:, :rows], self.down.bias)

    data = batches(4, 4, 4, 4)
    plain, _ = fit(Sliced(), data)
    callback = UnitScaleCallback(precision="fp8")
    steps, (warning,) = fit(Sliced(), data, callback)
    assert _are_rounded(steps, plain) == [True, True, False, True]
    assert "went from 100 % to 0 % of the FLOPs at step 2: 5 of 5 matmuls" in warning
    assert "its 40 output features are not a multiple of 16, and padding would not pay" in warning


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Small(nn.Linear(20, 20)),
            "net (its 20 input features are not a multiple of 16, and padding would not pay)",
        ),
        (lambda: Small(nn.Conv1d(1, 4, 3)), "net (not a linear layer)"),
        (lambda: Small(nn.Identity()), "no matmul ran"),
    ],
)
def test_fp8_without_eligible_matmuls_warns(
    make: Callable[[], pl.LightningModule], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    callback = UnitScaleCallback(precision="fp8")
    with caplog.at_level(logging.INFO):
        (warning,) = fit(make(), [torch.randn(4, 1, 20)] * 3, callback)[1]
    start = "UnitScaleCallback: training_step: "
    assert warning == f"{start}precision='fp8': no matmul runs in FP8: {text}"
    (line,) = (one.message for one in caplog.records if "training_step" in one.message)
    assert line.startswith(f"{start}no matmul runs in FP8: ")


@pytest.mark.parametrize("option", ["precision", "simulate"])
def test_skipped_first_batch_does_not_warn(option: str) -> None:
    class Skips(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx == 0 else self(batch).square().mean()

    callback = UnitScaleCallback(**{option: "fp8"})  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.Trainer(callbacks=[callback], **{**QUIET, "max_steps": 3}).fit(
            Skips(), DataLoader(batches(4, 4, 4), batch_size=None)
        )
    assert not [one for one in caught if "UnitScaleCallback" in str(one.message)]
    assert callback.coverage.num_in_format == callback.coverage.num_matmuls == 5


class Small(Net):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.factor = net, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.factor)


def test_excluded_layers_are_reported() -> None:
    plain, _ = fit(Net(), batches(4, 4))
    callback = UnitScaleCallback(precision=FP8(exclude="down"))
    steps, (warning,) = fit(Net(), batches(4, 4), callback)
    assert "3 of 5 matmuls (60 % of the FLOPs) run outside FP8: down (name excluded)" in warning
    assert callback.coverage.reasons_outside == {"name excluded": 0.6}
    assert not any(torch.equal(step[0], other[0]) for step, other in zip(steps, plain, strict=True))

    class Readout(Net):
        """A network whose readout is a small part, or most of it."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.head = nn.Linear(32, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(super().forward(x))

    small, large = UnitScaleCallback(precision="fp8"), UnitScaleCallback(precision="fp8")
    assert fit(Readout(4), batches(4, 4), small)[1] == []
    assert "outside FP8: name excluded by default" in small.coverage.line()
    (warning,) = fit(Readout(64), batches(4, 4), large)[1]
    assert warning.endswith("run outside FP8: head (name excluded by default)")


@pytest.mark.parametrize("evaluation", [False, True])
def test_evaluation_outside_fp8_warns_if_requested(evaluation: bool) -> None:
    callback = UnitScaleCallback(precision=FP8(evaluation=evaluation))
    trainer = pl.Trainer(callbacks=[callback], **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(Narrow(), DataLoader(batches(4, 4), batch_size=None), verbose=False)
    texts = [str(one.message) for one in caught if "outside FP8" in str(one.message)]
    assert [_NARROW in text for text in texts] == [True] * evaluation
    assert (callback.coverage.num_in_format > 0) is evaluation


class Between(Net):
    """A layer that Dynamo does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(self.up(x).relu()))

    @torch.compiler.disable
    def hidden(self, x: Tensor) -> Tensor:
        return self.middle(x)


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"simulate": "fp8"}], ids=str)
@pytest.mark.parametrize(
    "captured",
    [{"remat": "min_cut"}, pytest.param({"compile": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_matmuls_between_captured_graphs(options: dict[str, Any], captured: dict[str, Any]) -> None:
    callback = UnitScaleCallback(**options, **captured)
    plain, _ = fit(Between(), batches(4, 4, 4))
    steps, lost = fit(Between(), batches(4, 4, 4), callback)
    assert all(_are_rounded(steps, plain)) and not lost
    counts = {one.module: (one.kind, one.num_matmuls) for one in callback.coverage.counts}
    assert counts == {"up": ("format", 2), "middle": ("format", 3), "down": ("format", 3)}


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"simulate": "fp8"}], ids=str)
def test_matmuls_between_graphs_of_rules(options: dict[str, Any]) -> None:
    callback = UnitScaleCallback("u-mup", **options)
    _, lost = fit(Between(), batches(4, 4, 4), callback)
    assert not lost
    counts = {one.module: (one.kind, one.num_matmuls) for one in callback.coverage.counts}
    assert counts == {"up": ("format", 2), "middle": ("format", 3), "down": ("format", 3)}


@pytest.mark.slow
def test_captured_steps_beyond_the_recompile_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "RECOMPILE_LIMIT", 4)

    class Growing(Net):
        """Something is another one in each step."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, list[int]] = {"steps": []}

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen["steps"].append(batch_idx)
            return super().training_step(batch, batch_idx) * (1 + 0 * len(self.seen["steps"]))

    data = batches(*[4] * 8)
    plain, _ = fit(Growing(), data)
    callback = UnitScaleCallback(precision="fp8")
    steps, _ = fit(Growing(), data, callback, Capturing())
    assert all(_are_rounded(steps, plain))
    assert callback.coverage.num_in_format > 0


class Uneven(Net):
    """A network in which some activations become tiny at a step."""

    share, starts = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        small = torch.arange(48) < self.share * 48
        scale = torch.where(small, 1e-6, 1.0) if self.global_step >= self.starts else 1.0
        return self.down(hidden * scale)


def _uneven(share: float, starts: int) -> Uneven:
    module = Uneven()
    module.share, module.starts = share, starts
    return module


@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"simulate": "fp8"}], ids=str)
@pytest.mark.parametrize("starts", [0, 3])
def test_flushed_tensors_are_reported_once(options: dict[str, Any], starts: int) -> None:
    callback = UnitScaleCallback(**options, recalibrate=2)
    (warning,) = fit(_uneven(0.1875, starts), batches(*[64] * 9), callback)[1]
    assert f"training_step: flushed to zero at step {4 if starts else 0}: " in warning
    assert re.search(r"down\.linear:input \(1[89]\.?\d* % of its elements in E4M3FN\)", warning)
    # Its gradient is as uneven.
    gradient = "E5M2" if "simulate" in options else "E4M3FN"
    assert re.search(
        rf"up\.linear:gradient \(1[89]\.?\d* % of its elements in {gradient}\)", warning
    )
    assert warning.count("% of its elements") == 2


class UnevenRows(Net):
    """The weight and the gradient of its first layer are even only along the layer's own sums."""

    def __init__(self) -> None:
        super().__init__()
        small = torch.arange(self.up.out_features) < 9
        self.register_buffer("sizes", torch.where(small, 2.0**-20, 1.0))
        with torch.no_grad():
            self.up.weight.mul_(self.sizes[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.linear(x, self.up.weight) / self.sizes)


def test_flush_of_block_formats_is_measured_along_reduction() -> None:
    assert fit(UnevenRows(), batches(64), UnitScaleCallback(simulate="MXFP8"))[1] == []
    # Without blocks, the small rows are indeed lost.
    (warning,) = fit(UnevenRows(), batches(64), UnitScaleCallback(simulate="E4M3FN"))[1]
    assert "weight (" in warning


def test_few_flushed_elements_are_not_reported() -> None:
    for options in ({"precision": "fp8"}, {"simulate": "fp8"}):
        callback = UnitScaleCallback(**options, recalibrate=2)
        assert fit(Net(), batches(*[64] * 5), callback)[1] == []


def test_stale_units_are_reported_at_next_recalibration() -> None:
    class Fading(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2.0 ** (-14 * (self.global_step >= 1)))

    callback = UnitScaleCallback(precision="fp8", recalibrate=4)
    (warning,) = fit(Fading(), batches(*[64] * 6), callback)[1]
    assert "flushed to zero at step 4: " in warning and "up.linear:input (" in warning
