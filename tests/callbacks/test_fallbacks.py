"""Steps that cannot be captured run as written, with the same bits and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from lightning_unitscale.capture.fallback import Trial
from tests.callbacks.modules import Packed, Regression
from tests.callbacks.runs import Run, run
from tests.helpers import assert_same_bits


class Noted(Regression):
    """Keeps what its hooks were called with, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []
        self.install()

    def install(self) -> None:
        pass

    def note(self, gradient: Tensor) -> None:
        self.notes.append(float(gradient.norm()))


class BackwardHook(Noted):
    def install(self) -> None:
        self.first.register_full_backward_hook(lambda module, grads, outputs: self.note(outputs[0]))


class ChangingBackwardHook(Noted):
    def install(self) -> None:
        self.second.register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))


class BackwardPreHook(Noted):
    def install(self) -> None:
        self.second.register_full_backward_pre_hook(lambda module, outputs: (0.5 * outputs[0],))


class HookOfAll(Noted):
    def on_train_start(self) -> None:
        self.handle = nn.modules.module.register_module_full_backward_hook(
            lambda module, inputs, outputs: self.notes.append(float(outputs[0].sum()))
        )

    def on_train_end(self) -> None:
        self.handle.remove()
        del self.handle


class GradientNoise(Noted):
    """Draws for each parameter, in the order in which gradients are done."""

    def install(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: grad + 0.1 * torch.randn_like(grad))


class StepsInBackward(Noted):
    def install(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)

    def halve(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.note(parameter.grad)
        parameter.grad.mul_(0.5)


class LateBackwardHook(Noted):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            ChangingBackwardHook.install(self)  # type: ignore[arg-type]


def _slope(module: Regression, prediction: Tensor, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(prediction.logsumexp(1).sum(), x, create_graph=True)
    return slope.square().sum()


class Penalized(Noted):
    starts_at = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        prediction = self.forward(x)
        loss = (prediction - batch[1]).square().mean()
        if self.global_step >= self.starts_at:
            loss = loss + _slope(self, prediction, x)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class PenalizedLate(Penalized):
    starts_at = 3


class Curved(Noted):
    """Takes second derivatives outside of the step."""

    def backward(self, loss: Tensor) -> None:
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


class Adversarial(Noted):
    """Updates one part by hand, and takes second derivatives for the other one."""

    def install(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        x = batch[0].clone().requires_grad_()
        optimizer.zero_grad()
        self.manual_backward(_slope(self, self.forward(x), x))
        optimizer.step()


class _Strided(torch.autograd.Function):
    """A function whose results have other strides than the capture expects."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.fallbacks.strided(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ops.fallbacks.strided(grad)


@torch.library.custom_op("fallbacks::strided", mutates_args=())
def _strided(x: Tensor) -> Tensor:
    return x.clone()


@_strided.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])


class FailsToCompile(Noted):
    """After random numbers, batch statistics and a counter."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.notes.append(len(self.notes))
        prediction = _Strided.apply(self.forward(batch[0]))
        self.log("train_loss", prediction.detach().sum())
        return prediction.square().mean() + self.loss(batch)


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # Not so in a plain step.
        return torch.ops.fallbacks.no_graph(grad)


class Calls:
    """Lets an operator know whether a compiled graph runs it."""

    def __init__(self) -> None:
        self.fails = True


CALLS = Calls()


@torch.library.custom_op("fallbacks::no_graph", mutates_args=())
def _no_graph(x: Tensor) -> Tensor:
    if CALLS.fails:
        CALLS.fails = False
        raise RuntimeError("the first backward pass fails")
    return x.clone()


@_no_graph.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class ForwardMode(Noted):
    """Takes a derivative in forward mode, which the monitor's part of a graph does not have."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(batch[0], torch.ones_like(batch[0]))
            result, slope = forward_ad.unpack_dual(self.forward(dual))
            return (result - batch[1]).square().mean() + slope.square().mean()


class FailsInBackward(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.notes.append(len(self.notes))
        loss = self.loss((_FailsInBackward.apply(self.first.weight).sum() + batch[0], batch[1]))
        self.log("num_steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


class RetainsGradient(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.first(batch[0])
        hidden.retain_grad()
        self.hidden = hidden
        return self.second(hidden).square().mean()

    def on_after_backward(self) -> None:
        self.note(self.hidden.grad)
        del self.hidden


SEEN_BEFORE = {
    BackwardHook: "first has a backward hook, BackwardHook",
    ChangingBackwardHook: "second has a backward hook",
    BackwardPreHook: "second has a backward pre-hook",
    HookOfAll: "all modules have a backward hook",
    GradientNoise: "first.weight has a gradient hook",
    StepsInBackward: "first.weight has a post-accumulate-grad hook, StepsInBackward.halve",
    Curved: "gradients of gradients",
    Adversarial: "gradients of gradients",
}
UNDONE = {
    Penalized: "gradients of gradients",
    FailsToCompile: "captured, it fails",
    RetainsGradient: "retain_grad",
}
LATER = {
    LateBackwardHook: "second has a backward hook",
    PenalizedLate: "gradients of gradients",
}
# Found where another kind is: in the hooks of a layer, or in derivatives of derivatives.
_AS_ANOTHER = {ChangingBackwardHook, Adversarial, PenalizedLate}
CALLBACKS: dict[str, Callable[[], list[pl.Callback]]] = {
    "remat": lambda: [RematCallback("min_cut")],
    "remat, compiled": lambda: [RematCallback(1.0, compile=True)],
    "compiled": lambda: [UnitScaleCallback(compile=True)],
    "remat and both": lambda: [
        RematCallback(1.0),
        UnitScaleCallback(),
        ScaleMonitor(every_n_steps=2),
    ],
}


def _run(kind: type[Noted], callbacks: Sequence[pl.Callback] = ()) -> tuple[Run, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(kind, callbacks)
    return result, [str(one.message) for one in caught if kind.__name__ in str(one.message)]


def _assert_as_plain(kind: type[Noted], reason: str, callbacks: Sequence[pl.Callback]) -> None:
    plain, _ = _run(kind)
    ours, said = _run(kind, callbacks)
    assert_same_bits(ours.compared(), plain.compared())
    assert ours.module.notes == plain.module.notes
    assert len(said) == 1
    assert reason in said[0], said[0]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if kind in _AS_ANOTHER else [])
        for kind in (*SEEN_BEFORE, *UNDONE, *LATER)
    ],
)
def test_uncaptured_step_is_bit_identical_and_warns_once(kind: type[Noted]) -> None:
    callback = RematCallback("min_cut")
    reason = {**SEEN_BEFORE, **UNDONE, **LATER}[kind]
    _assert_as_plain(kind, reason, [callback])
    assert callback.reports == []
    assert callback.predicted_peak_bytes is None
    assert "Nothing is planned: " in callback.explain()


@pytest.mark.slow_cases
@pytest.mark.parametrize("arrangement", list(CALLBACKS)[1:])
@pytest.mark.parametrize("kind", [BackwardHook, GradientNoise, Penalized, Curved])
def test_uncaptured_step_with_other_callbacks(kind: type[Noted], arrangement: str) -> None:
    reason = {**SEEN_BEFORE, **UNDONE}[kind]
    _assert_as_plain(kind, reason, CALLBACKS[arrangement]())


@pytest.mark.slow
def test_failed_backward_pass_is_undone() -> None:
    CALLS.fails = False
    plain, _ = _run(FailsInBackward)
    CALLS.fails = True
    ours, said = _run(FailsInBackward, [RematCallback("min_cut")])
    assert not CALLS.fails
    assert_same_bits(ours.compared(), plain.compared())
    assert ours.module.notes == plain.module.notes
    assert len(said) == 1
    assert "the first backward pass fails" in said[0]


def test_failed_capture_exits_forward_mode_ad() -> None:
    callbacks = [RematCallback("min_cut"), ScaleMonitor(every_n_steps=2)]
    _assert_as_plain(ForwardMode, "captured, it fails", callbacks)


def test_fallback_warning_includes_budget() -> None:
    _, (said,) = _run(BackwardHook, [RematCallback("100KiB")])
    assert "without a plan: budget=102400 may not hold" in said


class BreaksInLoop(Noted):
    """Dynamo skips the whole step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.forward(batch[0]) - batch[1]).square().mean()
        for _ in range(2):
            torch._dynamo.graph_break()
        return loss


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(BackwardHook, marks=pytest.mark.slow),
        pytest.param(Penalized, marks=pytest.mark.slow),
        BreaksInLoop,
    ],
)
@pytest.mark.parametrize(
    "other",
    [
        lambda: RematCallback("min_cut"),
        pytest.param(lambda: UnitScaleCallback(compile=True), marks=pytest.mark.slow),
        pytest.param(lambda: UnitScaleCallback("u-mup"), marks=pytest.mark.slow),
    ],
)
def test_monitor_measures_uncaptured_step(
    kind: type[Noted], other: Callable[[], pl.Callback]
) -> None:
    plain, monitor = ScaleMonitor(every_n_steps=1), ScaleMonitor(every_n_steps=1)
    _run(kind, [plain])
    _, said = _run(kind, [other(), monitor])
    if "uncaptured" not in " ".join(said):
        return  # rules rewrite a step with gradients of gradients
    assert [shown.step for shown in monitor.snapshots][-5:] == [1, 2, 3, 4, 5]
    assert monitor.snapshots[-1].names == plain.snapshots[-1].names
    if not isinstance(other(), UnitScaleCallback):
        assert monitor.table(full=True) == plain.table(full=True)


class ForwardHooks(Noted):
    """Forward hooks are part of the graph, even if they are added and removed."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.handle = self.first.register_forward_hook(lambda module, args, out: 0.5 * out)
        if self.global_step == 4:
            self.handle.remove()
            del self.handle


@pytest.mark.slow
def test_forward_hooks_are_captured() -> None:
    plain, _ = _run(ForwardHooks)
    callback = RematCallback("min_cut")
    ours, said = _run(ForwardHooks, [callback])
    assert_same_bits((ours.outputs, ours.weights), (plain.outputs, plain.weights))
    assert said == []
    assert callback.reports


class Wrong(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.second(self.forward(batch[0])).square().mean()


def test_user_error_is_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run(Wrong, [RematCallback("min_cut")])


def test_trial_of_tensor_subclass_is_undone_unless_written() -> None:
    module = nn.Linear(2, 2)
    module.packed = nn.Parameter(Packed(torch.ones(3), torch.ones(())), requires_grad=False)
    trial = Trial(module)
    trial.begin()
    assert trial.undo()
    module.packed.codes.data.mul_(2.0)
    assert not trial.undo()


class Quantized(Noted):
    """It keeps a frozen weight in pieces, which Lightning moves at the end of a run."""

    def install(self) -> None:
        self.frozen = nn.Parameter(Packed(torch.ones(2), torch.ones(())), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.frozen.scale


def test_module_with_unmovable_state_is_not_captured() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(Quantized, [callback := RematCallback("min_cut")])
    said = [text for one in caught if "cannot run captured" in (text := str(one.message))]
    assert len(said) == 1 and "frozen is a Packed, which a Trainer cannot move" in said[0]
    assert not callback.reports
