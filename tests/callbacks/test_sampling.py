"""The steps that the monitor samples: a schedule, a window, and both ends of a training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_unitscale import ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.callbacks.monitored_steps import Sampling
from tests.callbacks.modules import Regression
from tests.callbacks.runs import pair, run


class Stream(IterableDataset[Any]):
    """Samples whose number is not known in advance."""

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        return iter([pair(generator) for _ in range(16)])


def _steps(options: dict[str, Any], **trainer: Any) -> list[int]:
    monitor = ScaleMonitor(**options)
    run(Regression, [monitor], **trainer)
    return [snapshot.step for snapshot in monitor.snapshots]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"max_steps": 23}, [0, 1, 10, 20, 22]),
        ({"max_steps": 1}, [0]),
        ({"max_steps": 2}, [0, 1]),
        # Four batches an epoch.
        ({"max_steps": -1, "max_epochs": 2}, [0, 1, 7]),
        ({"max_steps": -1, "max_epochs": 2, "limit_train_batches": 3}, [0, 1, 5]),
        ({"max_steps": -1, "max_epochs": 4, "accumulate_grad_batches": 3}, [0, 1, 7]),
        ({"max_steps": 100, "max_epochs": 1, "accumulate_grad_batches": 2}, [0, 1]),
        (
            {"max_steps": -1, "max_epochs": 2, "data": lambda: DataLoader(Stream(), batch_size=4)},
            [0, 1, 7],
        ),
    ],
)
def test_first_and_last_steps_are_sampled(trainer: dict[str, Any], expected: list[int]) -> None:
    assert _steps({"every_n_steps": 10}, **trainer) == expected


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"first_step": 4}, [4, 5, 10, 20, 22]),
        ({"last_step": 13}, [0, 1, 10, 13]),
        ({"first_step": 7, "last_step": 9}, [7, 8, 9]),
        ({"first_step": 3, "last_step": 3}, [3]),
        ({"first_step": 30}, []),
        ({"last_step": 100}, [0, 1, 10, 20, 22]),
    ],
)
def test_first_step_and_last_step_limit_samples(
    options: dict[str, Any], expected: list[int]
) -> None:
    assert _steps({"every_n_steps": 10, **options}, max_steps=23) == expected


def test_loss_is_not_checked_outside_window() -> None:
    class Broken(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (
                torch.nan if self.global_step == 6 else 1
            )

    for last_step, sampled in ((None, [0, 1, 7, 8]), (5, [0, 1, 5])):
        monitor = ScaleMonitor(every_n_steps=50, on_violation=lambda _: None, last_step=last_step)
        run(Broken, [monitor], max_steps=9)
        assert [snapshot.step for snapshot in monitor.snapshots] == sampled
        assert bool(monitor.alerts) == (last_step is None)


def test_short_run_ends_with_scaled_sample() -> None:
    callbacks = [UnitScaleCallback(), monitor := ScaleMonitor()]
    run(Regression, callbacks, max_steps=5)
    assert [snapshot.step for snapshot in monitor.snapshots] == [0, 1, 4]
    assert "step 4" in monitor.table()
    first, *others = monitor.snapshots
    assert not first.log2_sigma.any()
    assert all(snapshot.log2_sigma.any() for snapshot in others)
    assert "4 of 4 operands" in monitor.table()


def test_resumed_training_begins_with_a_sample(tmp_path: Any) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "at.ckpt")

    run(Regression, [Save()], max_steps=5)
    monitor = ScaleMonitor(every_n_steps=10)
    resumed = {"ckpt_path": tmp_path / "at.ckpt", "weights_only": False}
    run(Regression, [monitor], max_steps=12, entry_options=resumed)
    assert [snapshot.step for snapshot in monitor.snapshots] == [4, 5, 10, 11]


def test_loop_without_known_length_samples_no_last_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, told = ScaleMonitor(every_n_steps=10), ScaleMonitor(every_n_steps=10)
    for monitor, num_steps in ((plain, None), (told, 5)):
        with attach(model, optimizer, [monitor]) as attachment:
            attachment.num_steps = num_steps
            for _ in range(5):
                model(torch.randn(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert [snapshot.step for snapshot in plain.snapshots] == [0, 1]
    assert [snapshot.step for snapshot in told.snapshots] == [0, 1, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_steps": 0},
        {"first_step": -1},
        {"first_step": 1.0},
        {"first_step": True},
        {"last_step": "end"},
        {"first_step": 5, "last_step": 4},
    ],
)
def test_bad_sampling_arguments_are_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        Sampling(**{"every_n_steps": 10, **options})
