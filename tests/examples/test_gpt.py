import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from examples.gpt import GPT
from examples.text import TextDataModule


def _tiny(**arguments: Any) -> GPT:
    return GPT(**{"width": 16, "depth": 2, "num_heads": 2, "context": 12} | arguments)


def _tokens(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape)


def _trainer(**arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**defaults | arguments)


def test_logits_have_a_value_per_byte() -> None:
    assert _tiny()(_tokens(3, 12)).shape == (3, 12, 256)
    assert _tiny()(_tokens(3, 5)).shape == (3, 5, 256)


def test_attention_is_causal() -> None:
    model = _tiny()
    tokens = _tokens(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (tokens[0, 7] + 1) % 256
    differs = (model(tokens) != model(changed)).any(dim=-1)[0]
    assert differs.tolist() == [False] * 7 + [True] * 5


def test_untrained_loss_is_log_vocabulary_size() -> None:
    loss = _tiny()._loss((_tokens(8, 12), _tokens(8, 12)))
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


@pytest.mark.parametrize("tied_head", [True, False])
def test_tied_head_shares_embedding_weight(tied_head: bool) -> None:
    model = _tiny(tied_head=tied_head)
    assert (model.head.weight is model.byte_embedding.weight) == tied_head
    num_heads_weights = 256 * 16
    assert sum(p.numel() for p in model.parameters()) == (
        num_heads_weights * (1 if tied_head else 2)
        + 12 * 16  # positions
        + 2 * (12 * 16**2 + 13 * 16)  # blocks: 4 + 8 squares; biases and norms
        + 2 * 16  # last norm
    )


def test_dropout_is_for_training_only() -> None:
    model = _tiny(dropout=0.5)
    tokens = _tokens(2, 12)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_only_matrices_have_weight_decay() -> None:
    model = _tiny(weight_decay=0.3, decay_steps=10)
    optimizer = model.configure_optimizers()["optimizer"]
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for parameter, value in decay.items():
        assert value == (0.3 if parameter.ndim == 2 else 0.0)


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    factor = _tiny(warmup_steps=9, decay_steps=109)._learning_rate_factor()
    assert [factor(step) for step in (0, 4)] == [pytest.approx(0.1), pytest.approx(0.5)]
    assert factor(9) == 1
    assert factor(59) == pytest.approx(0.55)
    assert factor(109) == factor(1000) == pytest.approx(0.1)
    assert all(factor(step) > factor(step + 1) for step in range(9, 109))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_optimizer_gets_its_arguments(optimizer: str) -> None:
    model = _tiny(optimizer=optimizer, betas=[0.8, 0.9], momentum=0.7, decay_steps=10)
    (group, _) = model.configure_optimizers()["optimizer"].param_groups
    if optimizer == "adamw":
        assert group["betas"] == (0.8, 0.9)
    else:
        assert group["momentum"] == 0.7


@pytest.mark.parametrize(("optimizer", "learning_rate"), [("adamw", 1e-2), ("sgd", 0.3)])
def test_gpt_learns(text_file: Path, optimizer: str, learning_rate: float) -> None:
    model = _tiny(optimizer=optimizer, learning_rate=learning_rate, warmup_steps=5)
    data = TextDataModule(str(text_file), context=12, batch_size=16, val_samples=64)
    trainer = _trainer(max_steps=60, gradient_clip_val=1.0, val_check_interval=60)
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val_loss"] < 0.6 * math.log(256)


def test_every_step_runs_in_a_trainer(text_file: Path, tmp_path: Path) -> None:
    model = _tiny()
    data = TextDataModule(str(text_file), context=12, batch_size=4, val_samples=8)
    trainer = _trainer(max_steps=2, val_check_interval=2)
    trainer.fit(model, datamodule=data)
    assert {"train_loss", "val_loss"} <= set(trainer.callback_metrics)
    (validated,) = trainer.validate(model, datamodule=data, verbose=False)
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    assert validated["val_loss"] != tested["test_loss"]
    predictions = trainer.predict(model, datamodule=data)
    assert [p.shape for p in predictions] == [(4, 12), (4, 12)]
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = GPT.load_from_checkpoint(tmp_path / "model.ckpt")
    tokens = _tokens(2, 12)
    assert torch.equal(loaded(tokens), model(tokens))


def test_indivisible_width_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"`width=18`: 4 heads cannot share it"):
        GPT(width=18, num_heads=4)


def test_sequence_longer_than_context_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"`tokens` of 13 positions: .* context of 12"):
        _tiny()(_tokens(1, 13))
