"""Precision reports during training: they change no bit, and can choose exemptions."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_unitscale import (
    FP8,
    RematCallback,
    ScaleMonitor,
    Simulate,
    UnitScaleCallback,
    attach,
)
from lightning_unitscale.tensorboard.run_report import write_report

MEASURED = FP8(exclude="measured", measured_from=2)


class Step(pl.LightningModule):
    def __init__(self, is_manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(32, 16)
        )
        self.lm_head = torch.nn.Linear(16, 16)

    def training_step(self, batch, batch_idx):
        loss = self.lm_head(self.layers(batch[0])).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Ask(pl.Callback):
    def __init__(self, callback: UnitScaleCallback) -> None:
        self.callback, self.reports = callback, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.reports.append(self.callback.precision_report())


def fit(callback, tmp_path, *others, steps=5, module=None, **options):
    pl.seed_everything(1, verbose=False)
    module = module or Step()
    data = torch.utils.data.TensorDataset(torch.randn(32, 16))
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=TensorBoardLogger(tmp_path),
        callbacks=[callback, *others],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, 8))
    return trainer, [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", [{"precision": FP8()}, {"simulate": "E4M3FN"}, {}], ids=str)
def test_report_changes_no_bit(options, tmp_path):
    _, plain = fit(UnitScaleCallback(**options), tmp_path)
    callback = UnitScaleCallback(**options)
    ask = Ask(callback)
    trainer, asked = fit(callback, tmp_path, ask, ScaleMonitor(every_n_steps=1))
    assert all(map(torch.equal, plain, asked))
    report = ask.reports[-1]
    assert report.formats == ("E4M3FN",)
    reasons = {row.reason for row in report.rows if row.module == "lm_head"}
    assert reasons == ({"name excluded by default"} if options.get("precision") else {None})
    written = write_report([trainer.logger.log_dir], tmp_path / "page")
    assert report.summary() in next(iter(written.tables.values()))
    is_fp8 = "precision" in options  # which leaves out the readout
    rounded = "E4M3FN, 5 of 8 computations rounded" if is_fp8 else "E4M3FN, all rounded"
    assert rounded in written.page.read_text()


def test_report_chooses_exemptions(tmp_path):
    callback = UnitScaleCallback(precision=MEASURED)
    fit(callback, tmp_path, steps=6)
    chosen = callback.state_dict()["exempt"]
    lines = [line for line in callback.explain().splitlines() if line.startswith("Exempt")]
    assert [line.split(",")[0] for line in lines] == [
        "Exempt from step 2 on",
        "Exempt from step 4 on",
    ]
    assert chosen and all(name in lines[1] for name, _ in chosen)
    assert 0 < callback.coverage.num_in_format < callback.coverage.num_matmuls
    # A run from the checkpoint leaves out the same from its first step on.
    resumed = UnitScaleCallback(precision=MEASURED)
    resumed.load_state_dict(callback.state_dict())
    assert resumed.state_dict()["exempt"] == chosen


def test_accumulated_batches_share_one_report(tmp_path):
    callback = UnitScaleCallback(precision=MEASURED)
    fit(callback, tmp_path, steps=3, accumulate_grad_batches=2)
    lines = [line for line in callback.explain().splitlines() if line.startswith("Exempt")]
    assert [line.split(",")[0] for line in lines] == ["Exempt from step 2 on"]


def test_readout_is_exempt_until_the_first_report(tmp_path):
    callback = UnitScaleCallback(precision=MEASURED)
    fit(callback, tmp_path, steps=1)
    assert "this computation is exempt" in str(callback.explain())
    assert "exempt" not in callback.state_dict()
    # Two layers of three; the gradient of the batch is not wanted.
    assert callback.coverage.num_in_format == 5


def test_exempt_computations_of_a_simulation_are_not_rounded(tmp_path):
    exempt = [("layers.*", each) for each in ("forward", "input_gradient", "weight_gradient")]
    callback = UnitScaleCallback(simulate=Simulate("E2M1FN", exempt=exempt))
    fit(callback, tmp_path, steps=1)
    assert callback.coverage.num_in_format == 3


def test_unmeasurable_step_with_exclude_measured_is_an_error(tmp_path):
    for options in ({"module": Step(is_manual=True)}, {"others": [RematCallback("min_cut")]}):
        others = options.pop("others", [])
        with pytest.raises(ValueError, match=r"^exclude='measured': a report cannot run "):
            fit(UnitScaleCallback(precision=MEASURED), tmp_path, *others, **options)
    layer = torch.nn.Linear(16, 16)
    with pytest.raises(ValueError, match=r"^exclude='measured': a report needs "):
        attach(layer, callbacks=[UnitScaleCallback(precision=MEASURED)])


def test_report_of_step_that_cannot_rerun_is_an_error(tmp_path):
    callback = UnitScaleCallback()
    with pytest.raises(ValueError, match="automatic optimization"):
        fit(callback, tmp_path, Ask(callback), module=Step(is_manual=True))
    with pytest.raises(ValueError, match="no training batch"):
        UnitScaleCallback().precision_report()
