"""The summary of a run, from event files and in the loggers of others."""

import csv
import json
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_unitscale import ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.callbacks import ScaleWarning
from lightning_unitscale.cli import main
from lightning_unitscale.loops.loggers import MlflowWriter, NumberWriter, WandbWriter
from lightning_unitscale.precision.diagnosis import diagnose
from lightning_unitscale.scales.alerts import ScaleAlert
from lightning_unitscale.tensorboard.history import LastStep, read_run
from tests.callbacks.modules import Regression
from tests.callbacks.runs import run


def train(*, poison=False, **where):
    """Train three steps in simulated FP8; a NaN comes into a bias before the last one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = ScaleMonitor(every_n_steps=1, on_violation=None)
    callbacks = [UnitScaleCallback(simulate="fp8"), monitor]
    with attach(net, optimizer, callbacks=callbacks, **where):
        for step in range(3):
            if poison and step == 2:
                net[2].bias.data[0] = torch.nan
            net(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor


def test_command_summarizes_run(tmp_path, capsys):
    train(log_dir=tmp_path, poison=True)
    main(["diagnose", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["violations", "trends", "worst", "coverage", "first_nonfinite"]
    first = found["first_nonfinite"]
    assert (first["tensor"], first["step"], first["kind"]) == ("2.bias", 2, "nonfinite")
    assert first in found["violations"] and found["trends"] == []
    coverage = found["coverage"]
    assert coverage["matmuls"] == coverage["in_units"] == coverage["in_format"] == 5
    assert coverage["flops_in_format"] == 1.0 and coverage["reasons"] == {}
    assert found["worst"]["log2_rms"]["module"] in {"0", "1", "2"}
    main(["diagnose", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert "coverage: 5 of 5 matmuls scaled, 5 in a simulated format (100 % of the FLOPs)" in lines
    assert any(line.startswith("first NaN or infinity: step 2: 2.bias") for line in lines)


def test_clean_run_has_no_violation(tmp_path):
    train(log_dir=tmp_path)
    run = read_run(tmp_path)
    found = diagnose(LastStep(run), run.alerts(), None)
    assert found.violations == found.trends == ()
    assert found.first_nonfinite is None and found.coverage is None
    step = LastStep(run)
    worst = found.worst["log2_rms"]
    column = step.log2_rms(worst["direction"], stored=True)
    assert worst["value"] == pytest.approx(column[step.names.index(worst["tensor"])])
    for direction in ("forward", "backward"):
        values = step.log2_rms(direction, stored=True)[step.read_by_matmuls(direction)]
        assert abs(worst["value"]) >= abs(values).max()


def test_trends_and_the_cause_of_a_bad_loss(tmp_path):
    train(log_dir=tmp_path)
    alerts = [
        ScaleAlert("loss", 1, "loss", "", "forward", "is NaN"),
        ScaleAlert("nonfinite", 2, "0.linear", "0", "forward", "1 NaN among 4 elements", value=1.0),
        ScaleAlert("trend", 2, "0.weight", "0", "forward", "grows", "FP16", 12.0),
    ]
    found = diagnose(LastStep(read_run(tmp_path)), alerts)
    assert found.first_nonfinite["tensor"] == "0.linear"
    assert [one["tensor"] for one in found.trends] == ["0.weight"]
    assert [one["tensor"] for one in found.violations] == ["loss", "0.linear"]
    json.dumps(found.to_json(), allow_nan=False)


def test_errors_have_exit_status_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", str(tmp_path)])
    assert ended.value.code == 2
    assert "no event files here" in capsys.readouterr().err


SUMMARY = "coverage: 5 of 5 matmuls scaled"


def test_csv_file_has_summary(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    train(loggers=logger)
    logger.save()
    with (tmp_path / "lightning_logs/version_0/metrics.csv").open() as file:
        cells = [row.get("scales/diagnosis") for row in csv.DictReader(file)]
    assert SUMMARY in cells[-1] and not any(cells[:-1])


def test_wandb_and_trackio_get_the_summary(monkeypatch):
    """A fake of the two, whose classes have one form."""
    logged = []

    class Fake:
        def __init__(self, **_):
            pass

    fake = type("fake", (), {"Histogram": Fake, "Table": Fake})
    for package in ("wandb", "trackio"):
        monkeypatch.setitem(__import__("sys").modules, package, fake)
        writer = WandbWriter(lambda values, step: logged.append((step, values)), package)
        train(loggers=writer)
        step, values = logged[-1]
        assert step == 2 and SUMMARY in values["scales/diagnosis"]


def test_mlflow_gets_summary_as_text(monkeypatch):
    texts = {}

    class Client:
        def log_batch(self, run_id, tags):
            pass

        def log_text(self, run_id, text, name):
            texts[name] = text

    entities = type("entities", (), {"RunTag": lambda *pair: pair})
    monkeypatch.setitem(__import__("sys").modules, "mlflow.entities", entities)
    train(loggers=MlflowWriter(lambda values, step: None, Client(), "run"))
    assert SUMMARY in texts["scales/diagnosis.txt"]


def test_numeric_logger_gets_only_numbers():
    logged = []
    train(loggers=NumberWriter(lambda values, step: logged.append(values)))
    assert all(isinstance(value, float) for values in logged for value in values.values())


class _Poisoned(Regression):
    """A module whose second batch has a NaN on request."""

    def __init__(self, is_poisoned):
        super().__init__()
        self.is_poisoned = is_poisoned

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x * torch.nan if self.is_poisoned else x, y), batch_idx)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_trainings_have_separate_summaries(accumulate, tmp_path):
    """One pair of callbacks for two trainers of a process, the first of which has a NaN."""
    monitor, unit_scale = ScaleMonitor(every_n_steps=1), UnitScaleCallback()
    texts = []
    for is_poisoned in (True, False):
        logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScaleWarning)
            run(
                lambda is_poisoned=is_poisoned: _Poisoned(is_poisoned),
                [unit_scale, monitor],
                logger=logger,
                max_steps=3,
                accumulate_grad_batches=accumulate,
            )
        logger.save()
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("scales/diagnosis")]
        (row,) = rows
        assert row["step"] == "2"
        texts.append(row["scales/diagnosis"])
    assert "first NaN or infinity: step 0" in texts[0]
    assert "NaN" not in texts[1] and "violation" not in texts[1]
    # The matmuls of one batch are counted.
    assert SUMMARY in texts[0] and SUMMARY in texts[1]
