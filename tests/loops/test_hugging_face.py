"""Callbacks in Hugging Face's Trainer, and in a loop by Accelerate."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale import HFCallback, ScaleMonitor, UnitScaleCallback, attach
from tests.helpers import assert_same_bits
from tests.loops.loops import LOSSLESS, NUM_STEPS, batches, new

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def train(
    callbacks: list[Any], folder: Path, *, resume: bool = False
) -> tuple[list[Any], dict[str, Tensor]]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(32, (32, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=3,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    timeless = [
        {name: entry[name] for name in ("loss", "eval_loss", "grad_norm") if name in entry}
        for entry in trainer.state.log_history
    ]
    return timeless, model.state_dict()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Tensor]]:
    return train([], tmp_path_factory.mktemp("plain"))


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("how", LOSSLESS)
def test_the_same_with_and_without(how: str, plain: Any, tmp_path: Path) -> None:
    callbacks = LOSSLESS[how]()
    assert_same_bits(train([HFCallback(callbacks)], tmp_path), plain)
    for callback in callbacks:
        if isinstance(callback, UnitScaleCallback):
            assert callback.coverage.line().startswith("42 of 42 products in units (100 %")
        else:
            assert [snapshot.step for snapshot in callback.snapshots] == [0, 2, 4]
            assert "transformer.h.0.mlp.c_fc.addmm" in callback.snapshots[0].names
            assert list((tmp_path / "scales").glob("events*"))


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
def test_a_format_is_resumed(plain: Any, tmp_path: Path) -> None:
    def callback() -> HFCallback:
        return HFCallback(UnitScaleCallback(simulate="fp8"))

    log, weights = train([callback()], tmp_path)
    assert log != plain[0]
    shutil.rmtree(tmp_path / f"checkpoint-{NUM_STEPS}")
    resumed, again = train([callback()], tmp_path, resume=True)
    assert_same_bits((resumed, again), (log, weights))


def test_a_violation_stops_the_training(tmp_path: Path) -> None:
    monitor = ScaleMonitor(
        every_n_steps=1, on_violation="stop", thresholds={"E4M3FN": {"flushed": 0.0}}
    )
    with pytest.warns(UserWarning, match="E4M3FN"):
        log, _ = train([HFCallback(monitor)], tmp_path)
    assert sum("loss" in entry for entry in log) == 1


@pytest.mark.parametrize("how", [None, *LOSSLESS])
def test_accelerate(how: str | None) -> None:
    results = []
    for own in ([], [] if how is None else LOSSLESS[how]()):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(*new())
        losses = []
        with attach(model, optimizer, own) as attachment:
            for x, y in batches(2 * NUM_STEPS):
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
            assert attachment.step_index == NUM_STEPS
        results.append((losses, model.state_dict()))
    assert_same_bits(*results)
