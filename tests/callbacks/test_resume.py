"""A run that was killed continues as if it had not been, with and without the callbacks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_unitscale import UnitScaleCallback
from tests.callbacks.modules import Evaluated, Regression, adamw
from tests.callbacks.runs import (
    ARRANGEMENTS,
    QUIET,
    Recorder,
    both,
    loader,
    monitor_of,
    run,
    unit_scale_of,
)
from tests.distributed.launch import codes_of_ranks
from tests.helpers import assert_same_bits


class Module(Evaluated):
    def __init__(self) -> None:
        super().__init__(adamw)

    def train_dataloader(self) -> Any:
        # Ten batches an epoch, so that step 20 ends one; no shuffling, whose order is not saved.
        return loader(40)

    val_dataloader = train_dataloader


def train(
    callbacks: list[pl.Callback], max_steps: int, folder: Path, ckpt_path: Any = None
) -> tuple[list[Any], dict[str, Any], pl.Trainer]:
    """Train to ``max_steps``, with a checkpoint at step 20."""
    pl.seed_everything(5, verbose=False)
    recorder = Recorder()
    saved = ModelCheckpoint(folder, "{step}", every_n_train_steps=20, save_top_k=-1, save_last=True)
    options = {**QUIET, "enable_checkpointing": True, "limit_val_batches": 0}
    trainer = pl.Trainer(
        callbacks=[*callbacks, recorder, saved],
        max_steps=max_steps,
        gradient_clip_val=1.0,
        **options,
    )
    module = Module()
    module.dropout.p = 0.0  # random states are no part of Lightning's checkpoints
    trainer.fit(module, ckpt_path=ckpt_path)
    return recorder.outputs, dict(module.state_dict()), trainer


pytestmark = [
    pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Any], Path]:
    """40 plain steps, and the folder with their checkpoint of step 20."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        outputs, weights, _ = train([], 40, folder)
    return outputs, weights, folder


_KILLED = ("both", "both, captured")


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one for each process that was killed at step 23."""
    folder = tmp_path_factory.mktemp("killed")
    for how in _KILLED:
        codes, output = codes_of_ranks("tests.callbacks.killed_run", folder, how, num_ranks=1)
        assert codes == [-signal.SIGKILL], output
    return folder


@pytest.fixture(params=[pytest.param(how, marks=pytest.mark.slow) for how in _KILLED])
def killed(request: pytest.FixtureRequest, killed_runs: Path) -> tuple[str, Path]:
    """The arrangement, and its checkpoint at step 20."""
    return request.param, killed_runs / request.param / "step=20.ckpt"


class First(pl.Callback):
    """Keeps the units with which the first batch begins."""

    gauge: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.gauge is None:
            self.gauge = unit_scale_of(trainer.callbacks).gauge.state()


def test_killed_run_continues(killed: Any, whole: Any, tmp_path: Path) -> None:
    how, checkpoint = killed
    callbacks = ARRANGEMENTS[how]()
    first = First()
    outputs, weights, _ = train([*callbacks, first], 40, tmp_path, checkpoint)
    assert len(outputs) == 20
    assert_same_bits((outputs, weights), (whole[0][20:], whole[1]))
    # The gauge came with the checkpoint: nothing was measured on the first batch.
    saved = torch.load(checkpoint, weights_only=True)["callbacks"]["UnitScaleCallback"]
    assert first.gauge == {name: tuple(pair) for name, pair in saved["gauge"].items()}
    assert unit_scale_of(callbacks).gauge.state().keys() == saved["gauge"].keys()
    assert [one.step for one in monitor_of(callbacks).snapshots] == [20, *range(21, 40, 3)]


def test_killed_run_continues_without_the_callbacks(
    killed: Any, whole: Any, tmp_path: Path
) -> None:
    outputs, weights, _ = train([], 40, tmp_path, killed[1])
    assert_same_bits((outputs, weights), (whole[0][20:], whole[1]))


@pytest.mark.slow_cases
@pytest.mark.parametrize("how", ["both", "both, captured"])
def test_plain_run_continues_with_the_callbacks(how: str, whole: Any, tmp_path: Path) -> None:
    callbacks = ARRANGEMENTS[how]()
    outputs, weights, _ = train(callbacks, 40, tmp_path, whole[2] / "step=20.ckpt")
    assert_same_bits((outputs, weights), (whole[0][20:], whole[1]))
    assert len(unit_scale_of(callbacks).gauge) >= 4


def test_run_continues_with_and_without_captured_steps(
    killed: Any, whole: Any, tmp_path: Path
) -> None:
    other = {"both": "both, captured", "both, captured": "both"}[killed[0]]
    outputs, weights, _ = train(ARRANGEMENTS[other](), 40, tmp_path, killed[1])
    assert_same_bits((outputs, weights), (whole[0][20:], whole[1]))


@pytest.mark.slow
def test_ckpt_path_last_is_found(whole: Any, tmp_path: Path) -> None:
    train(both(), 20, tmp_path)
    # A run that finished 20 steps goes on to 40.
    outputs, weights, _ = train(both(), 40, tmp_path, "last")
    assert_same_bits((outputs, weights), (whole[0][20:], whole[1]))


def test_checkpoint_differs_from_plain_one_only_in_callback_state(killed: Any, whole: Any) -> None:
    _, path = killed
    found = torch.load(path, weights_only=True)
    plain = torch.load(whole[2] / "step=20.ckpt", weights_only=True)
    ours = found["callbacks"].pop("UnitScaleCallback")
    assert set(ours) - {"plain", "missing"} == {"gauge", "depth"}
    assert ours["depth"] == "products"
    assert all(
        type(name) is str and type(pair) is list and all(type(one) is int for one in pair)
        for name, pair in ours["gauge"].items()
    )
    for one in (found, plain):
        # They name their folder.
        one.pop("callbacks")
        one["loops"] = None
    assert_same_bits(found, plain)


def test_load_from_checkpoint_has_same_weights(killed: Any, whole: Any) -> None:
    module = Module.load_from_checkpoint(killed[1])
    expected = torch.load(whole[2] / "step=20.ckpt", weights_only=True)["state_dict"]
    assert_same_bits(dict(module.state_dict()), dict(expected))


def test_callback_state_survives_load_and_save() -> None:
    trained, resumed = UnitScaleCallback(), UnitScaleCallback()
    run(Regression, [trained], max_steps=2)
    state = trained.state_dict()
    gauge = trained.gauge.state()
    assert any(any(pair) for pair in gauge.values())
    assert state["gauge"] == {name: list(pair) for name, pair in gauge.items()}
    state["plain"] = {"first.linear": {"forward": "a reason"}}
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert resumed.gauge.state() == gauge


@pytest.mark.slow
def test_load_from_checkpoint_without_this_package(killed_runs: Path) -> None:
    # Loading imports nothing of this package: its state is made of plain types.
    script = (
        "import sys, torch; sys.modules['lightning_unitscale'] = None\n"
        "for path in sys.argv[1:]:\n"
        "    print(len(torch.load(path, weights_only=True)['state_dict']))"
    )
    paths = [str(killed_runs / how / "step=20.ckpt") for how in _KILLED]
    done = subprocess.run(
        [sys.executable, "-c", script, *paths], timeout=60, capture_output=True, text=True
    )
    counts = done.stdout.split()
    assert len(counts) == len(paths) and all(map(str.isdecimal, counts)), done.stderr


@pytest.mark.parametrize("entry", ["validate", "test"])
def test_evaluation_of_checkpoint_matches_plain(entry: str, killed: Any) -> None:
    results = []
    for callbacks in ([], ARRANGEMENTS[killed[0]]()):
        trainer = pl.Trainer(callbacks=callbacks, **QUIET)
        options = {"ckpt_path": killed[1], "verbose": False}
        results.append(getattr(trainer, entry)(Module(), loader(8), **options))
    assert results[0] == results[1]
