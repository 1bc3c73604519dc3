"""``UnitScaleCallback(precision="fp8")``: in Trainers of every precision, resumed, and refused."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import MixedPrecision, TransformerEnginePrecision
from torch import Tensor, nn

from lightning_unitscale import FP8, ScaleMonitor, UnitScaleCallback
from lightning_unitscale.callbacks.options import U_MUP_EXCLUDE
from lightning_unitscale.capture.name_patterns import NamePatterns
from tests.callbacks.runs import BOTH_WAYS, loader, run
from tests.helpers import assert_same_bits


def _row(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, generator=generator)
    return x, x[:8].cumsum(0)


class Tower(pl.LightningModule):
    """Two layers that FP8 can take, and a last one of 8 features that it cannot."""

    outlier: float | Tensor

    def __init__(self, outlier: float = 0.0) -> None:
        super().__init__()
        self.outlier = outlier
        self.fc1, self.fc2, self.head = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x))
        # One neuron far above the others: at the RMS of all, the others are nothing.
        h = h + self.outlier * F.one_hot(torch.tensor(3), 48).to(h.dtype)
        return self.head(self.fc2(h))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x).float(), y.float())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _data() -> Any:
    return loader(128, 16, make=_row)


def _losses(callbacks: Any = (), make: Any = Tower, **options: Any) -> Tensor:
    with warnings.catch_warnings():
        # torch's notice that a CPU autocast in FP16 is slow, and the like.
        warnings.simplefilter("ignore")
        done = run(make, callbacks, data=_data, max_steps=24, **options)
    return torch.stack([step["loss"] for step in done.outputs if step is not None])


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_training_in_fp8_is_close_to_plain_training(precision: Any) -> None:
    plugins: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    plain = _losses(**plugins)
    callback = UnitScaleCallback(precision="fp8")
    found = _losses([callback], **plugins)
    text = callback.explain()
    assert "2 of 3 matmuls in FP8 with constant scales" in text
    assert "name excluded" in text
    assert not torch.equal(found, plain)
    torch.testing.assert_close(found, plain, rtol=0.15, atol=0.0)
    assert found[-1] < 0.6 * found[0]


@pytest.mark.parametrize(
    ("name", "gradient"), [("E4M3FN", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2)]
)
def test_dtypes_with_bf16_mixed(name: Any, gradient: torch.dtype) -> None:
    """The layers have the operand and result types of autocast."""
    seen: set[tuple[torch.dtype, torch.dtype, torch.dtype]] = set()
    file = import_module("lightning_unitscale.functional.low_precision")
    plain = file.scaled_matmul

    def recorded(rows: Tensor, columns: Tensor, scale: Tensor, dtype: Any, **options: Any) -> Any:
        seen.add((rows.dtype, columns.dtype, dtype))
        return plain(rows, columns, scale, dtype, **options)

    with pytest.MonkeyPatch.context() as patch:
        for place in (file, import_module("lightning_unitscale.matmuls.fp8_linear")):
            patch.setattr(place, "scaled_matmul", recorded)
        callback = UnitScaleCallback(precision=FP8(gradient_format=name))
        _losses([callback], precision="bf16-mixed")
    operand = torch.float8_e4m3fn
    assert seen == {
        (operand, operand, torch.bfloat16),  # results
        (gradient, operand, torch.bfloat16),  # gradients, of weights too: autocast casts them up
    }


@pytest.mark.slow_cases
@BOTH_WAYS
def test_evaluation_and_monitor_do_not_change_fp8(captured: dict[str, Any]) -> None:
    """Measuring or showing units changes no bit of FP8."""
    data = {"val_dataloaders": _data()}
    alone = _losses([UnitScaleCallback(**captured, precision="fp8", recalibrate=None)])
    callback = UnitScaleCallback(**captured, precision="fp8", recalibrate=None)
    watched = _losses([callback, ScaleMonitor(every_n_steps=2)])
    assert_same_bits(watched, alone)
    looked = UnitScaleCallback(**captured, precision="fp8", recalibrate=5)
    done = run(Tower, [looked], data=_data, max_steps=11, entry_options=data)
    assert "New units for" in looked.explain() and "validation_step" in looked.explain()
    assert torch.isfinite(done.metrics["val_loss"])


def test_layers_that_do_not_fit_stay_out_of_fp8(tmp_path: Any) -> None:
    def make() -> Tower:
        return Tower(outlier=1e6)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "third.ckpt")

    callback = UnitScaleCallback(precision="fp8")
    _losses([callback, Save()], make)
    text = callback.explain()
    assert "of its input would be zero in E4M3FN" in text and "1 of 3 matmuls in FP8" in text
    # A resumed run does not measure again, and knows it all the same.
    resumed = UnitScaleCallback(precision="fp8")
    _losses([resumed], make, entry_options={"ckpt_path": tmp_path / "third.ckpt"})
    assert "of its input would be zero in E4M3FN" in resumed.explain()
    # Another module is measured for itself.
    _losses([resumed])
    assert "2 of 3 matmuls in FP8" in resumed.explain()


@pytest.mark.slow
def test_wide_range_gradients_use_e5m2(tmp_path: Any) -> None:
    class Uneven(Tower):
        """Nine samples of ten hardly count, from the fourth step on."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            error = (self(x).float() - y.float()).square().mean(1)
            late = self.global_step >= self.starts
            return (error * torch.where(torch.arange(len(error)) > 0, 1e-4**late, 1.0)).mean()

        starts = 0

    class Late(Uneven):
        starts = 4

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "third.ckpt")

    reason = "of its gradient would be zero in E4M3FN"
    callback = UnitScaleCallback(precision=FP8(exclude=None))
    _losses([callback, Save()], Uneven)
    text = callback.explain()
    assert text.count("constant scales, gradients in E5M2: ") == 2 and reason in text
    assert "2 of 3 matmuls in FP8" in text and "Gradients in E5M2 from" not in text
    resumed = UnitScaleCallback(precision=FP8(exclude=None))
    _losses([resumed], Uneven, entry_options={"ckpt_path": tmp_path / "third.ckpt"})
    assert resumed.explain().count("constant scales, gradients in E5M2: ") == 2
    late = UnitScaleCallback(precision=FP8(exclude=None))
    _losses([late], Late)
    # At step 8 they are far too small; in the units that they then get, most of them are nothing.
    (event,) = [one for one in late.explain().splitlines() if "Gradients in E5M2 from" in one]
    assert event.startswith("Gradients in E5M2 from step 16 on: fc2.linear, since ")
    # The head's gradient is as uneven, but the head is not in FP8.
    assert "; fc1.linear, since " in event and "head" not in event
    always = UnitScaleCallback(precision=FP8(exclude=None, gradient_format="E5M2"))
    _losses([always], Uneven)
    assert always.explain().count("constant scales, gradients in E5M2\n") == 2


@pytest.mark.slow
def test_moving_grid_moves_in_training_only(tmp_path: Any) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 16:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    moving, fixed = (
        UnitScaleCallback(precision="fp8"),
        UnitScaleCallback(precision=FP8(grid="fixed")),
    )
    losses = _losses([moving, Save()])
    assert "constant scales, moving grid" in moving.explain()
    assert not torch.equal(losses, _losses([fixed])) and "moving" not in fixed.explain()
    data = {"val_dataloaders": _data()}
    evaluated = _losses(
        [UnitScaleCallback(precision="fp8")], entry_options=data, val_check_interval=3
    )
    assert_same_bits(evaluated, losses)
    options = {"ckpt_path": tmp_path / "half.ckpt"}
    resumed = _losses([UnitScaleCallback(precision="fp8")], entry_options=options)
    assert_same_bits(resumed, losses[16:])


@pytest.mark.slow
@pytest.mark.parametrize("captured", [{"compile": True}, {"remat": "min_cut"}], ids=str)
def test_layer_that_stops_fitting_leaves_fp8(captured: dict[str, Any], torch_kernels: None) -> None:
    class Later(Tower):
        """A network whose outlier appears during training, as in language models."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("height", torch.zeros(()))
            self.outlier = self.height

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 4:
                self.height += 1e6

    callback = UnitScaleCallback(**captured, precision="fp8")
    losses = _losses([callback], Later)
    text = callback.explain()
    # At step 8 its units are too small by far; in those that it then gets, the rest is nothing.
    assert "Out of FP8 from step 16 on: fc2.linear, since" in text
    assert "of its input would be zero in E4M3FN" in text and "1 of 3 matmuls in FP8" in text
    assert torch.isfinite(losses).all()


@pytest.mark.slow
def test_excluded_layers_stay_out_of_fp8() -> None:
    callback = UnitScaleCallback(precision="fp8")
    _losses([callback])
    # The head is the readout.
    assert callback.explain().count(" kept    name excluded by default\n") == 1
    assert "; 9.09 % outside FP8: name excluded by default\n" in callback.explain()
    callback = UnitScaleCallback(precision=FP8(exclude=None))
    _losses([callback])
    assert "name excluded" not in callback.explain()
    assert (
        "its 8 output features are not a multiple of 16, and padding would not pay"
        in callback.explain()
    )
    by_name = UnitScaleCallback(precision=FP8(exclude="fc1"))
    _losses([by_name])
    assert "name excluded" in by_name.explain()
    by_rules = UnitScaleCallback("u-mup", precision="fp8")
    _losses([by_rules])
    # fc2 is a feed-forward's last layer and head the readout.
    assert by_rules.explain().count(" kept    name excluded by default\n") == 2
    assert "1 of 3 matmuls in FP8" in by_rules.explain()


@pytest.mark.parametrize(
    "path",
    [
        "transformer.h.0.attn.c_proj",
        "transformer.h.0.mlp.c_proj",
        "model.layers.3.self_attn.o_proj",
        "model.layers.3.mlp.down_proj",
        "bert.encoder.layer.1.attention.output.dense",
        "bert.encoder.layer.1.output.dense",
        "encoder.layers.0.self_attn.out_proj",
        "encoder.layers.0.linear2",
        "blocks.2.attn.proj",
        "blocks.2.mlp.fc2",
        "lm_head",
    ],
)
def test_names_that_u_mup_excludes_from_fp8(path: str) -> None:
    assert not NamePatterns(exclude=U_MUP_EXCLUDE).match_names(path)


@pytest.mark.parametrize(
    "path",
    ["transformer.h.0.attn.c_attn", "model.layers.3.mlp.gate_proj", "blocks.2.mlp.fc1",
     "bert.encoder.layer.1.intermediate.dense", "encoder.layers.0.linear1"],
)  # fmt: skip
def test_names_that_u_mup_runs_in_fp8(path: str) -> None:
    assert NamePatterns(exclude=U_MUP_EXCLUDE).match_names(path)


def test_incompatible_trainer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = object.__new__(TransformerEnginePrecision)
    trainer = pl.Trainer(accelerator="cpu", logger=False, barebones=True)
    trainer.strategy.precision_plugin = plugin
    module, callback = Tower(), UnitScaleCallback(precision="fp8")
    with pytest.raises(
        MisconfigurationException,
        match=r"precision='fp8' with TransformerEnginePrecision: it replaces .*. Expected '32",
    ):
        callback.setup(trainer, module, "fit")
    assert "training_step" not in module.__dict__
    monkeypatch.setattr(
        "lightning_unitscale.callbacks.trainer_settings.why_no_fp8", lambda device: "too old"
    )
    with pytest.raises(MisconfigurationException, match=r"on cpu: too old. Expected a GPU of"):
        _losses([UnitScaleCallback(precision="fp8")])


def test_bad_gradient_format_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"gradient_format='FP16': no format of FP8 gradients. Expec"
    ):
        FP8(gradient_format="FP16")  # type: ignore[arg-type]


def test_fp8_options_from_command_line() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(UnitScaleCallback, "callback")
    given = ["--callback.precision=FP8", "--callback.precision.exclude=[head, '*.fc2']"]
    callback = parser.instantiate(parser.parse_args(given)).callback
    assert callback.precision == FP8(exclude=["head", "*.fc2"])
    given = ["--callback.precision={gradient_format: E5M2, grid: fixed}"]
    callback = parser.instantiate(parser.parse_args(given)).callback
    assert callback.precision == FP8(gradient_format="E5M2", grid="fixed")
