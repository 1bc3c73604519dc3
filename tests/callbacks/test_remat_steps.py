"""Unusual steps within a memory budget keep the bits of the ordinary step."""

import copy
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.utils.data import DataLoader

from lightning_unitscale import RematCallback, ScaleMonitor
from tests.callbacks.runs import QUIET
from tests.helpers import assert_same_bits


class _Step(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.copy = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x).relu())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class _ViewsInInferenceMode(_Step):
    @torch.inference_mode()
    def parts(self, x):
        return x[:2], x.view(-1)[:8], self(x).tanh()

    def training_step(self, batch, batch_idx):
        rows, flat, target = self.parts(batch)
        return (self(batch) - target.clone()).square().mean() + self(rows + flat).sum()


class _Momentum(_Step):
    """A momentum encoder, as in MoCo."""

    def training_step(self, batch, batch_idx):
        for new, old in zip(self.first.parameters(), self.copy.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data
        with torch.no_grad():
            key = self.copy(batch)
        return (self.first(batch) - key).square().mean() + self(batch).square().mean()


class _ReassignedAfterwards(_Step):
    """The backward pass multiplies by the weights that the forward pass has read."""

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        for param in (*self.first.parameters(), *self.second.parameters()):
            param.data = param.data.clamp(-0.1, 0.1)
        return loss


class _Cond(_Step):
    def training_step(self, batch, batch_idx):
        def sine(x):
            return self.first(x).sin()

        def cosine(x):
            return self.first(x).cos()

        hidden = torch.cond(batch.sum() > 0, sine, cosine, (batch,))
        return self.second(hidden).square().mean()


class _Scan(_Step):
    def training_step(self, batch, batch_idx):
        def step(state, row):
            return 0.5 * state + row.tanh(), (state + row).clone()

        _, states = scan(step, torch.zeros(16), self.first(batch))
        return self.second(states).square().mean()


STEPS = (_ViewsInInferenceMode, _Momentum, _ReassignedAfterwards, _Cond, _Scan)


def _fit(module: pl.LightningModule, *callbacks: pl.Callback) -> None:
    torch.manual_seed(2)
    data = [torch.randn(4, 8) for _ in range(3)]
    trainer = pl.Trainer(callbacks=list(callbacks), max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(data, batch_size=None))


@pytest.mark.slow_cases
@pytest.mark.parametrize("step", STEPS)
def test_planned_step_is_bit_identical(step: type[_Step]) -> None:
    plain = step()
    planned, callback = copy.deepcopy(plain), RematCallback("min_cut")
    _fit(plain)
    _fit(planned, callback)
    expected, got = plain.state_dict(), planned.state_dict()
    for name in expected:
        assert torch.equal(expected[name], got[name]), name
    assert len(callback.reports) == 1


@pytest.mark.slow
@pytest.mark.parametrize("step", [_Momentum, _ReassignedAfterwards])
@pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")
def test_data_assignment_with_monitor_is_bit_identical(step: type[_Step]) -> None:
    plain = step()
    planned = copy.deepcopy(plain)
    _fit(plain)
    _fit(planned, RematCallback("min_cut"), ScaleMonitor(2))
    assert_same_bits(dict(planned.state_dict()), dict(plain.state_dict()))


class _Broken(_Step):
    def training_step(self, batch, batch_idx):
        hidden = self.first(batch).relu()
        torch._dynamo.graph_break()
        return self.second(hidden).square().mean()


@pytest.mark.slow
def test_graph_break_warns_once_with_line() -> None:
    line = _Broken.training_step.__code__.co_firstlineno + 2
    with pytest.warns(UserWarning, match=rf"in 2 parts.*test_remat_steps.py:{line}\.") as warned:
        _fit(_Broken(), RematCallback(1.0))
    assert sum("RematCallback" in str(warning.message) for warning in warned) == 1


class _Adversarial(_Step):
    def training_step(self, batch, batch_idx):
        x = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).square().sum(), x)
        return self(batch + gradient.sign()).square().mean()


@pytest.mark.slow
def test_warning_has_only_user_lines() -> None:
    with pytest.warns(UserWarning, match=r"test_remat_steps.py:\d+\. Expected") as warned:
        _fit(_Adversarial(), RematCallback(1.0))
    (message,) = (str(one.message) for one in warned if "RematCallback" in str(one.message))
    assert "lightning_unitscale" not in message
    assert "Generators" not in message


class _Queue(_Step):
    """A queue of keys, as in MoCo: the step replaces some keys that its loss has read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(8, 6))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch, batch_idx):
        query = self(batch)
        loss = (query @ self.keys.clone()).logsumexp(1).mean()
        place = int(self.place)  # breaks the graph
        self.keys[:, place : place + 2] = query[:2].detach().T
        self.place[0] = (place + 2) % 6
        return loss


class _Center(_Step):
    """A step whose center moves before its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.ones(8))

    def training_step(self, batch, batch_idx):
        return (self(batch) * self.center.exp()).square().mean()

    def on_before_zero_grad(self, optimizer):
        self.center.data.mul_(0.5)


class _List(_Center):
    """The center is neither a buffer nor an attribute, but an item of a list."""

    def training_step(self, batch, batch_idx):
        self.held = {"center": [self.center.clone()]} if batch_idx == 0 else self.held
        torch._dynamo.graph_break()
        return (self(batch) * self.held["center"][0].exp()).square().mean()

    def on_before_zero_grad(self, optimizer):
        self.held["center"][0].data.mul_(0.5)


class _Residual(_Step):
    """A later part of the step writes into a result of an earlier one."""

    def training_step(self, batch, batch_idx):
        hidden = self.first(batch).relu() + 1
        torch._dynamo.graph_break()
        branch = self.second(hidden + 1)
        torch._dynamo.graph_break()
        hidden += branch.sum()
        return branch.square().mean() + hidden.mean()


@pytest.mark.slow_cases
@pytest.mark.parametrize("step", [_Queue, _Center, _List, _Residual])
@pytest.mark.filterwarnings("ignore:RematCallback. training_step is captured in")
def test_tensors_written_before_backward_are_not_recomputed(
    step: type[_Step],
) -> None:
    plain = step()
    planned, callback = copy.deepcopy(plain), RematCallback("min_cut")
    _fit(plain)
    _fit(planned, callback)
    assert_same_bits(dict(planned.state_dict()), dict(plain.state_dict()))
    assert callback.reports


class _Averaged(_Step):
    """A step with a metric of a sum, which comes to require a gradient, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        self.log("average", self.average(loss), on_step=True)
        return loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:RematCallback. training_step is captured in")
def test_metric_counts_match_plain_run() -> None:
    found = []
    for callbacks in ([], [RematCallback("min_cut")]):
        torch.manual_seed(0)
        module = _Averaged()
        _fit(module, *callbacks)
        found.append([module.average.compute(), module.trainer.callback_metrics["average"]])
    assert_same_bits(found[1], found[0])


class _Inner(_Step):
    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class _Trains(_Step):
    """It trains another module, as a hyperparameter search does."""

    def training_step(self, batch, batch_idx):
        inner = _Inner()
        _fit(inner)
        return (self(batch) - inner(batch).detach()).square().mean()


@pytest.mark.slow
def test_nested_trainer_in_step_matches_plain_run() -> None:
    plain = _Trains()
    planned, callback = copy.deepcopy(plain), RematCallback("min_cut")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step is captured in parts
        _fit(plain)
        _fit(planned, callback)
    assert_same_bits(dict(planned.state_dict()), dict(plain.state_dict()))
    assert pl.Trainer.fit.__qualname__ == "Trainer.fit"
    assert not hasattr(pl.Trainer.fit, "_torchdynamo_disable")
