"""Conflicting callbacks and settings raise an error that names both."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import TransformerEnginePrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_unitscale import (
    FP8,
    PipelineStrategy,
    RematCallback,
    Rules,
    ScaleMonitor,
    Simulate,
    UnitScaleCallback,
    transforms,
)
from tests.callbacks.modules import Regression
from tests.callbacks.runs import QUIET, MemoryLogger, loader

# Of each package, in which a user may have written the Trainer.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class _OwnUnits(UnitScaleCallback):
    """A user's own."""


class _OwnMonitor(ScaleMonitor):
    """A user's own."""


_Make = Callable[[], list[Any]]
_BUDGETS = "both set the memory budget of a step"
_MODES = "both set the mode in which Inductor compiles"
# Names of both settings, in the order of the callbacks.
CONTRADICTIONS: dict[str, tuple[_Make, tuple[str, ...]]] = {
    "two unit scalings": (
        lambda: [UnitScaleCallback(), UnitScaleCallback()],
        ("UnitScaleCallback is given 2 times",),
    ),
    "two unit scalings of several kinds": (
        lambda: [UnitScaleCallback("u-mup"), ScaleMonitor(), _OwnUnits()],
        ("UnitScaleCallback(method='u-mup') and _OwnUnits() both set",),
    ),
    "two monitors": (
        lambda: [ScaleMonitor(), UnitScaleCallback(), ScaleMonitor(exclude="head")],
        ("ScaleMonitor is given 2 times",),
    ),
    "two monitors of several kinds": (
        lambda: [_OwnMonitor(3), ScaleMonitor()],
        ("_OwnMonitor(every_n_steps=3) and ScaleMonitor() both set",),
    ),
    "two budgets of a kind": (
        lambda: [RematCallback(0.5), RematCallback(0.6)],
        ("RematCallback is given 2 times",),
    ),
    "two budgets": (
        lambda: [RematCallback("1MiB"), UnitScaleCallback(remat="20MiB")],
        ("RematCallback(budget='1MiB')", "UnitScaleCallback(remat='20MiB')", _BUDGETS),
    ),
    "two budgets, reversed": (
        lambda: [UnitScaleCallback(remat="20MiB"), RematCallback("1MiB")],
        ("UnitScaleCallback(remat='20MiB')", "RematCallback(budget='1MiB')", _BUDGETS),
    ),
    # Only one of them plans, and the other one's explain() would say nothing.
    "a budget twice": (
        lambda: [UnitScaleCallback(remat=0.5), RematCallback(0.5)],
        ("UnitScaleCallback(remat=0.5)", "RematCallback(budget=0.5)", _BUDGETS),
    ),
    "two modes of Inductor": (
        lambda: [
            UnitScaleCallback(compile="max-autotune"),
            RematCallback(0.5, compile="reduce-overhead"),
        ],
        ("compile='max-autotune'", "compile='reduce-overhead'", _MODES),
    ),
}
TOGETHER: dict[str, _Make] = {
    "a budget beside units": lambda: [RematCallback(1.0), UnitScaleCallback(), ScaleMonitor()],
    "one mode of Inductor": lambda: [
        UnitScaleCallback(compile="default"),
        RematCallback(1.0, compile="default"),
    ],
    "a mode of Inductor and a flag": lambda: [
        UnitScaleCallback(compile="default"),
        RematCallback(1.0, compile=True),
    ],
}


def trainer(package: str, callbacks: Any) -> Any:
    trainer = importlib.import_module(package).Trainer
    return trainer(callbacks=callbacks, **{**QUIET, "max_steps": 1})


def module(package: str) -> Any:
    module = importlib.import_module(package).LightningModule

    class Small(module):  # type: ignore[misc]  # of either package
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.linear(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Small()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_conflicting_callbacks_are_an_error(name: str, package: str) -> None:
    make, parts = CONTRADICTIONS[name]
    trained = module(package)
    before = dict(vars(trained))
    with pytest.raises(MisconfigurationException) as raised:
        trainer(package, make()).fit(trained, loader())
    text = str(raised.value)
    assert re.search(r"^callbacks: .+. Expected .+\. .+\.$", text)
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions)
    assert "forward" not in vars(trained) and "training_step" not in vars(trained)
    assert before.keys() <= vars(trained).keys()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_trainer_with_duplicate_state_keys_is_an_error(name: str, package: str) -> None:
    """Lightning compares the states' keys by then, in an error that does not say what to do."""
    make, _ = CONTRADICTIONS[name]
    if any(isinstance(one, UnitScaleCallback) for one in make()):
        with pytest.raises(MisconfigurationException, match=r"callbacks: "):
            trainer(package, make())


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", TOGETHER)
def test_compatible_callbacks_run_together(name: str) -> None:
    options = {**QUIET, "max_steps": 1, "logger": MemoryLogger()}
    pl.Trainer(callbacks=TOGETHER[name](), **options).fit(Regression(), loader())


# Of its own class, and of one that it derives from, Lightning takes the module's callback alone.
@pytest.mark.parametrize("name", ["two budgets", "two budgets, reversed", "two modes of Inductor"])
def test_callbacks_from_configure_callbacks(name: str) -> None:
    make, parts = CONTRADICTIONS[name]
    first, *others = make()

    class Bringing(Regression):
        def configure_callbacks(self) -> list[Any]:
            return others

    with pytest.raises(MisconfigurationException) as raised:
        trainer(PACKAGES[0], [first]).fit(Bringing(), loader())
    assert all(part in str(raised.value) for part in parts)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", [UnitScaleCallback, ScaleMonitor, RematCallback, _OwnMonitor])
@pytest.mark.parametrize("others", [list, lambda: [UnitScaleCallback()], lambda: [ScaleMonitor()]])
def test_callback_class_instead_of_instance_is_an_error(
    kind: Any, others: Any, package: str
) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        trainer(package, [*others(), kind]).fit(module(package), loader())
    name = kind.__name__
    assert str(raised.value).startswith(f"callbacks={name}: it is the class. Expected an instance.")
    assert f"Write {name}()" in str(raised.value)


def test_hooks_of_a_class_are_called_with_an_instance() -> None:
    """A subclass calls the hooks of its base this way."""
    seen = []

    class Own(UnitScaleCallback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            UnitScaleCallback.setup(self, trainer, pl_module, stage)
            seen.append(stage)

    own = Own()
    trainer(PACKAGES[0], [own]).fit(Regression(), loader())
    assert seen == ["fit"]
    assert own.coverage.num_in_units > 0
    assert UnitScaleCallback.setup.__name__ == "setup"


OPTIONS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "two ways of rounding": (
        lambda: UnitScaleCallback(precision="fp8", simulate="fp8"),
        ("precision='fp8'", "simulate"),
    ),
    "two ways of rounding, objects": (
        lambda: UnitScaleCallback(precision=FP8(), simulate=Simulate()),
        ("precision=FP8(", "simulate"),
    ),
    "residual and its multiplier": (
        lambda: UnitScaleCallback(Rules("u-mup", residual_mult=2.0), residual=(0.5, 0.5)),
        ("residual=(0.5, 0.5)", "residual_mult=2.0"),
    ),
    "residual and its ratio": (
        lambda: UnitScaleCallback(Rules("u-mup", residual_attn_ratio=0.5), residual=(0.5, 0.5)),
        ("residual=(0.5, 0.5)", "residual_attn_ratio=0.5"),
    ),
    "residual and its multiplier in a transform": (
        lambda: transforms.unit_scale(
            torch.nn.Linear(2, 2), residual=(0.5, 0.5), residual_mult=2.0
        ),
        ("residual=(0.5, 0.5)", "residual_mult=2.0"),
    ),
    "microbatches of an evaluation that has none": (
        lambda: PipelineStrategy(num_microbatches=2, evaluation="whole", num_eval_microbatches=2),
        ("num_eval_microbatches=2", "evaluation='whole'"),
    ),
    "dynamic scales on a moving grid": (
        lambda: transforms.fp8_linears(torch.nn.Linear(2, 2), scaling="dynamic", grid="moving"),
        ("grid='moving'", "scaling='dynamic'"),
    ),
    **{
        f"{name} without rules": (
            lambda options={name: value}: UnitScaleCallback(**options),  # type: ignore[misc]
            (f"{name}={value!r}", "method='lossless'"),
        )
        for name, value in {
            "replace": {},
            "residual": (1.0, 1.0),
            "lr_scaling": "match",
            "init_weights": False,
            "on_unknown": "keep",
        }.items()
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_conflicting_options_are_an_error(name: str) -> None:
    make, parts = OPTIONS[name]
    with pytest.raises(ValueError, match=r".+: .+. Expected .+\. .+\.$") as raised:
        make()
    assert all(part in str(raised.value) for part in parts)


@pytest.mark.parametrize(
    ("option", "named"),
    [({"precision": "fp8"}, "precision='fp8'"), ({"simulate": "E5M2"}, "simulate='E5M2'")],
)
def test_plugin_that_hides_matmuls(option: Any, named: str) -> None:
    callback = UnitScaleCallback(**option)
    trained = pl.Trainer(callbacks=[callback], **{**QUIET, "max_steps": 1})
    plugin = object.__new__(TransformerEnginePrecision)
    trained.strategy.precision_plugin = plugin
    with pytest.raises(MisconfigurationException, match=f"{named} with TransformerEnginePrecis"):
        callback.setup(trained, Regression(), "fit")
