"""A layer is replaced during a fit by rules, or between two fits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.capture.step_messages import CaptureError
from tests.callbacks.rule_runs import WIDTH, Classifier, fit, loader, plan_of, rms, trainer_with


def new_readout(module: Any) -> None:
    torch.manual_seed(5)
    module.readout = nn.Linear(WIDTH, 7)


def adapted(module: Any) -> None:
    torch.manual_seed(5)
    module.readout = nn.Sequential(module.readout, nn.Linear(5, 6))


class Exchanging(Classifier):
    """Exchanges a layer in a hook that Lightning calls after those of the callbacks."""

    def __init__(self, change: Callable[[Any], None], at: int = 3) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.change, self.at = change, at
        self.seen: dict[str, float] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.at and not self.seen:
            self.seen["before"] = 1.0
            known = set(self.parameters())
            self.change(self)
            new = [one for one in self.parameters() if one not in known]
            self.trainer.optimizers[0].add_param_group({"params": new})

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == self.at:
            self.seen = {name: rms(one) for name, one in self.named_parameters()}
            self.gradients = {name: rms(one.grad) for name, one in self.named_parameters()}


@pytest.mark.parametrize("change", [new_readout, adapted])
@pytest.mark.parametrize("method", ["unit-scaling", "u-mup"])
def test_exchanged_layer_is_set_to_unit_scale(change: Callable[[Any], None], method: Any) -> None:
    module, callback = Exchanging(change), UnitScaleCallback(method)
    fit(module, callback, max_steps=6)
    name = "readout" if change is new_readout else "readout.1"
    assert module.seen[f"{name}.weight"] == pytest.approx(1, rel=0.02)
    assert module.seen[f"{name}.bias"] == 0
    assert 0.4 < module.gradients[f"{name}.weight"] < 2.5
    plan = plan_of(module).parameters[f"{name}.weight"]
    assert plan.info.fan_out == (7 if change is new_readout else 6)
    assert plan.info.sigma == pytest.approx(1 / (3 * plan.info.fan_in) ** 0.5, rel=0.2)


def test_exchanged_layer_has_rate_of_its_role() -> None:
    module = Exchanging(new_readout)
    fit(module, UnitScaleCallback("unit-scaling"), max_steps=4)
    sigma = plan_of(module).parameters["readout.weight"].info.sigma
    torch.manual_seed(5)
    step = module.readout.weight.detach() - nn.Linear(WIDTH, 7).weight.detach() / sigma
    # The first step of Adam changes every element by its rate.
    assert float(step.abs().median()) == pytest.approx(1e-2 / sigma, rel=0.01)


def test_layer_exchanged_between_fits() -> None:
    torch.manual_seed(0)
    module: Any = Classifier()
    fit(module, UnitScaleCallback("u-mup"), max_steps=3)
    body = module.first.weight.detach().clone()
    new_readout(module)
    with pytest.raises(CaptureError, match=r"readout.weight replaced what was set to unit scale"):
        trainer_with(UnitScaleCallback("u-mup")).validate(module, loader(8), verbose=False)
    kept = copy.deepcopy(module.train())  # Lightning leaves it in evaluation mode
    trained: list[float] = []

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            trained.extend([rms(pl_module.readout.weight), rms(pl_module.first.weight - body)])

    for one in (module, kept):  # the copy has a record of its own
        trained.clear()
        fit(one, UnitScaleCallback("u-mup"), Look(), max_steps=1)
        assert trained == [pytest.approx(1, rel=0.02), 0]


def test_copy_of_trained_layer_is_not_rescaled() -> None:
    torch.manual_seed(0)
    module: Any = Classifier()
    fit(module, UnitScaleCallback("u-mup"), max_steps=3)
    trainer = trainer_with(UnitScaleCallback("u-mup"))
    (before,) = trainer.validate(module, loader(8), verbose=False)
    module.readout = copy.deepcopy(module.readout)
    (after,) = trainer.validate(module, loader(8), verbose=False)
    assert before == after


class Adapter(nn.Module):
    """The attributes of a layer of PEFT that the check reads."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(WIDTH, 2, bias=False)
        self.lora_B = nn.Linear(2, 5, bias=False)
        self.merged_adapters: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        added = 0 if self.merged_adapters else self.lora_B(self.lora_A(x))
        return self.base_layer(x) + added


def test_merged_adapter_is_an_error() -> None:
    module: Any = Classifier()
    module.readout = Adapter(module.readout)

    class Merging(pl.Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.readout.merged_adapters.append("default")

    with pytest.raises(CaptureError, match=r"the adapter of readout is merged into its layer"):
        fit(module, UnitScaleCallback("u-mup"), Merging(), max_steps=4, limit_val_batches=1)
