"""Callbacks in Hugging Face's Trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_unitscale import HFCallback, ScaleMonitor, UnitScaleCallback
from tests.helpers import assert_same_bits
from tests.loops.loops import NUM_STEPS, new
from tests.loops.methods import METHODS

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def train(
    callbacks: list[Any], folder: Path, **options: Any
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
            **options,
        ),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=callbacks,
    )
    trainer.train()
    timeless = [
        {name: entry[name] for name in ("loss", "eval_loss", "grad_norm") if name in entry}
        for entry in trainer.state.log_history
    ]
    return timeless, model.state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [{}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}],
    ids=["eager", "compiled"],
)
def test_language_model_is_bit_identical(options: dict[str, Any], tmp_path: Path) -> None:
    callbacks = METHODS["both"]()
    plain = train([], tmp_path / "plain", **options)
    assert_same_bits(train([HFCallback(callbacks)], tmp_path, **options), plain)
    for callback in callbacks:
        if isinstance(callback, UnitScaleCallback):
            assert callback.coverage.line().startswith("42 of 42 matmuls scaled (100 %")
        else:
            assert [snapshot.step for snapshot in callback.snapshots] == [0, 1, 2, 4, 5]
            # Of compiled code what goes in and out is seen.
            name = "compiled" if options else "transformer.h.0.mlp.c_fc.addmm"
            assert name in callback.snapshots[0].names
            assert list((tmp_path / "scales").glob("events*"))


def test_module_is_found_inside_wrapper(tmp_path: Path) -> None:
    module, optimizer = new(0)
    held = SimpleNamespace(name="held", other=torch.nn.Linear(2, 2), body=module)
    callback = HFCallback([UnitScaleCallback()], log_dir=tmp_path)
    told = SimpleNamespace(output_dir=str(tmp_path), report_to=[])
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    arguments = (told, state, None)
    callback.on_train_begin(*arguments, model=held, optimizer=optimizer)
    assert callback.attachment.module is module
    callback.on_train_end(*arguments)
    with pytest.raises(TypeError, match=r"is a SimpleNamespace\. Expected the torch\.nn\.M"):
        callback.on_train_begin(*arguments, model=SimpleNamespace(), optimizer=optimizer)


def test_bad_callbacks_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"callbacks=ScaleMonitor: .*Write ScaleMonitor\(\)"):
        HFCallback([ScaleMonitor])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="ScaleMonitor is given 2 times"):
        HFCallback([ScaleMonitor(), ScaleMonitor()])
    # The Trainer makes an instance of the class itself.
    with pytest.raises(ValueError, match=r"callbacks=\(\): .*Write HFCallback\(\[UnitScale"):
        train([HFCallback], Path())


def test_violation_stops_the_training(tmp_path: Path) -> None:
    monitor = ScaleMonitor(
        every_n_steps=1, on_violation="stop", thresholds={"E4M3FN": {"flushed": 0.0}}
    )
    with pytest.warns(UserWarning, match="E4M3FN"):
        log, _ = train([HFCallback(monitor)], tmp_path)
    assert sum("loss" in entry for entry in log) == 1
