"""Each logger has the scales, read back from its files."""

from __future__ import annotations

import csv
import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_unitscale import HFCallback, ScaleMonitor, attach
from lightning_unitscale.tensorboard.writer import Thinning
from tests.loops.loops import batches, new

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
NUMBERS = {
    *(
        f"scales/log2_rms/{name}_{direction}"
        for name in ("min", "median", "max")
        for direction in ("forward", "backward")
    ),
    *(
        f"scales/{name}/{kind}_{direction}"
        for name in ("FP16", "E4M3FN", "E5M2")
        for kind in ("overflow", "underflow")
        for direction in ("forward", "backward")
    ),
}
NAMES = {f"{name}_tensor" for name in NUMBERS if "log2_rms" not in name}
SAMPLED = [0, 1, 2, 4]
# Also sampled if the loop knows that it is the last one.
LAST = 5
# W&B and MLflow use what others deprecate, and say so of what they do themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:There is a wandb run already", "ignore:unclosed"),
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)


def monitor() -> ScaleMonitor:
    """Finds something at the first sample, and something new at a later one."""
    return ScaleMonitor(every_n_steps=2, on_violation=None, thresholds={"E4M3FN": 0.0})


def fit(package: str, loggers: list[Any], callbacks: list[Any]) -> None:
    """Six steps, of which the later ones have a metric more."""
    pl = import_module(package)

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = new()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            if batch_idx >= 3:
                self.log("late", 2 * loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    pl.Trainer(
        max_steps=6,
        accelerator="cpu",
        logger=loggers,
        callbacks=callbacks,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(batches(), batch_size=None))


def csv_rows(folder: str) -> list[dict[str, str]]:
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        return [{key: value for key, value in row.items() if value} for row in rows]


def check_names(rows: list[dict[str, Any]], used: ScaleMonitor) -> None:
    """The tensor that is named has lost the share that is told."""
    assert len(rows) == len(used.snapshots)
    for row, snapshot in zip(rows, used.snapshots, strict=True):
        named = {key for key in NAMES if row.get(key)}
        assert len(named) >= 2
        for key in named:
            _, name, ending = key.removesuffix("_tensor").split("/")
            word, direction = ending.split("_")
            kind = {"overflow": "overflow", "underflow": "flushed"}[word]
            statistics = snapshot.statistics(row[key], direction, stored=True)
            assert statistics is not None
            share = float(row[key.removesuffix("_tensor")])
            assert share == pytest.approx(statistics.fraction(name, kind))


@pytest.mark.parametrize("flush_every", [1, 100])
@pytest.mark.parametrize("package", PACKAGES)
def test_csv_file_has_scales(package: str, flush_every: int, tmp_path: Path) -> None:
    """Columns come later, and no row is lost, whenever the file is rewritten."""
    logger_class = import_module(f"{package}.loggers").CSVLogger
    used = monitor()
    runs = {}
    for name, callbacks in {"with": [used], "without": []}.items():
        logger = logger_class(tmp_path, name, flush_logs_every_n_steps=flush_every)
        fit(package, [logger], callbacks)
        runs[name] = csv_rows(logger.log_dir)
    scales = [row for row in runs["with"] if "scales/FP16/overflow_forward" in row]
    assert all(row.keys() >= NUMBERS for row in scales)
    assert [int(row["step"]) for row in scales] == [*SAMPLED, LAST]
    check_names(scales, used)
    alerts = [row for row in runs["with"] if "scales/alerts" in row]
    told = "\n".join(row["scales/alerts"] for row in alerts).splitlines()
    assert told == [str(alert) for alert in used.alerts] and len(told) >= 3
    own = [row for row in runs["with"] if "loss" in row]
    assert own == runs["without"]
    summary = [row["scales/diagnosis"] for row in runs["with"] if "scales/diagnosis" in row]
    assert len(summary) == 1
    assert len(runs["with"]) == len(own) + len(scales) + len(alerts) + len(summary)


def test_fabric_csv_logger_has_scales(tmp_path: Path) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    used, logger = monitor(), CSVLogger(tmp_path)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[used], loggers=logger)
    fabric.launch()
    model, optimizer = fabric.setup(*new())
    for step, (x, y) in enumerate(batches()):
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.log("loss", loss, step)
    logger.finalize("success")
    (attachment,) = used.attachments
    (attached,) = attachment.callbacks
    attachment.detach()
    rows = csv_rows(logger.log_dir)
    assert [int(row["step"]) for row in rows if "loss" in row] == list(range(6))
    check_names([row for row in rows if "scales/log2_rms/min_forward" in row], attached)


def records(run_dir: str) -> Iterator[Any]:
    """The records of an offline run of W&B: protobuf messages in a log of LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = Path(run_dir).parent.glob("*.wandb")
    data, parts, position = path.read_bytes(), [], 7
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7
        parts.append(data[position : position + length])
        position += length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(b"".join(parts))
            parts = []


def history(run: Any) -> list[dict[str, Any]]:
    """The rows of a run, which ends here."""
    run_dir = run.dir
    run.finish()
    # The file is complete when the process is gone that writes it.
    import_module("wandb").teardown()
    rows = []
    for record in records(run_dir):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
    return [
        {key: json.loads(value) for key, value in row.items() if not key.startswith("_")}
        for row in rows
    ]


def summary_of(run_dir: str) -> dict[str, Any]:
    """The summary of an offline run, which has ended."""
    found = {}
    for record in records(run_dir):
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                found[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found


def check_wandb(rows: list[dict[str, Any]], run_dir: str, used: ScaleMonitor) -> None:
    """Numbers, names, histograms and tables."""
    assert all(row.keys() >= NUMBERS | NAMES for row in rows)
    check_names(rows, used)
    for row, snapshot in zip(rows, used.snapshots, strict=True):
        for direction in ("forward", "backward"):
            counts = row[f"scales/exponents/{direction}/values"]
            read = snapshot.read_by_matmuls(direction)
            assert sum(counts) == snapshot.exponent_counts(direction)[read].sum()
        table = json.loads((Path(run_dir) / row["scales/table/path"]).read_text())
        assert table["columns"][:3] == ["tensor", "module", "direction"]
        assert {cells[0] for cells in table["data"]} == set(snapshot.names)


def test_wandb_with_other_loggers(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    loggers = import_module("lightning.pytorch.loggers")
    own: dict[str, list[dict[str, Any]]] = {}
    for name in ("with", "without"):
        used = monitor()
        logger = loggers.WandbLogger(project=name, save_dir=tmp_path, offline=True)
        beside = [loggers.CSVLogger(tmp_path), loggers.TensorBoardLogger(tmp_path)]
        fit("lightning.pytorch", [*beside, logger], [used] if name == "with" else [])
        run_dir = logger.experiment.dir
        rows = history(logger.experiment)
        own[name] = [row for row in rows if "loss" in row]
        assert [row["trainer/global_step"] for row in own[name]] == list(range(6))
        if name == "with":
            scales = [row for row in rows if "scales/FP16/overflow_forward" in row]
            assert [row["trainer/global_step"] for row in scales] == [*SAMPLED, LAST]
            check_wandb(scales, run_dir, used)
            told = [row["scales/alerts"] for row in rows if "scales/alerts" in row]
            assert "\n".join(told) == "\n".join(map(str, used.alerts))
            of_file = csv_rows(beside[0].log_dir)
            (text,) = (row["scales/diagnosis"] for row in of_file if "scales/diagnosis" in row)
            assert len(of_file) - 1 == len(rows)
            # W&B has it beside its history.
            assert summary_of(run_dir)["scales/diagnosis"] == text
    assert own["with"] == own["without"]


def plain_loop(log: Callable[[float, int], None], *loggers: Any) -> ScaleMonitor:
    model, optimizer = new()
    used = monitor()
    with attach(model, optimizer, used, loggers=loggers):
        for step, (x, y) in enumerate(batches()):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item(), step)
    return used


@pytest.mark.parametrize("names_step", [False, True])
def test_wandb_run_keeps_its_step_axis(names_step: bool, tmp_path: Path) -> None:
    """Logs are part of the user's rows: their number and their axis are as without."""
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="plain", dir=tmp_path)
    losses = []

    def log(loss: float, step: int) -> None:
        losses.append(loss)
        run.log({"loss": loss}, step=10 * step if names_step else None)

    used = plain_loop(log, run)
    rows = history(run)
    assert [row["loss"] for row in rows if "loss" in row] == losses
    # Where the user names steps, the row that is open is the one before.
    assert len(rows) == 6
    scales = [row for row in rows if "scales/step" in row]
    # Both of the first samples are before it; a row has the last of several.
    assert [row["scales/step"] for row in scales] == SAMPLED[names_step:]
    used.snapshots = used.snapshots[names_step:]
    check_wandb(scales, run.dir, used)


def check_mlflow(client: Any, run_id: str, used: ScaleMonitor) -> None:
    data = client.get_run(run_id).data
    assert data.metrics.keys() >= NUMBERS
    for key in NUMBERS:
        steps = [item.step for item in client.get_metric_history(run_id, key)]
        assert steps == [snapshot.step for snapshot in used.snapshots]
    last = ScaleMonitor()
    last.snapshots = used.snapshots[-1:]
    check_names([{**data.metrics, **data.tags}], last)
    assert data.tags.keys() >= NAMES
    from mlflow.artifacts import load_text

    folder = client.get_run(run_id).info.artifact_uri
    assert load_text(f"{folder}/scales/table.txt") == used.table(full=True)
    told = load_text(f"{folder}/scales/alerts.txt")
    assert told == "\n".join(map(str, used.alerts))


@pytest.mark.parametrize("package", PACKAGES)
def test_mlflow_logger_has_scales(package: str, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    logger = import_module(f"{package}.loggers").MLFlowLogger(save_dir=str(tmp_path / "runs"))
    used = monitor()
    fit(package, [logger], [used])
    check_mlflow(logger.experiment, logger.run_id, used)
    losses = logger.experiment.get_metric_history(logger.run_id, "loss")
    assert [item.step for item in losses] == list(range(6))


def test_mlflow_run_in_plain_loop(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    with mlflow.start_run() as run:
        used = plain_loop(lambda loss, step: mlflow.log_metric("loss", loss, step=step), run)
    check_mlflow(mlflow.MlflowClient(), run.info.run_id, used)


def trackio_rows(project: str) -> list[tuple[int, dict[str, Any]]]:
    path = import_module("trackio.utils").TRACKIO_DIR / f"{project}.db"
    with sqlite3.connect(path) as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    return [(step, json.loads(values)) for step, values in rows]


def test_trackio_run_in_plain_loop() -> None:
    trackio = pytest.importorskip("trackio")
    run = trackio.init(project="plain")
    used = plain_loop(lambda loss, step: run.log({"loss": loss}, step=step), run)
    run.finish()
    rows = trackio_rows("plain")
    assert [step for step, values in rows if "loss" in values] == list(range(6))
    scales = [(step, values) for step, values in rows if values.keys() >= NUMBERS]
    assert [step for step, _ in scales] == SAMPLED
    check_names([values for _, values in scales], used)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_hugging_face_loggers_have_scales(name: str, tmp_path: Path) -> None:
    package = pytest.importorskip(name)
    transformers = pytest.importorskip("transformers")
    used = monitor()
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32)
    tokens = torch.randint(32, (32, 16))
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=20,
            logging_steps=1,
            per_device_train_batch_size=4,
            save_strategy="no",
            use_cpu=True,
            report_to=[name],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[HFCallback(used)],
    )
    trainer.train()
    # So many that the last sample gets its table when the training ends.
    losses, sampled = list(range(1, 21)), [0, 1, *range(2, 20, 2), 19]
    if name == "mlflow":
        client = package.MlflowClient()
        (run,) = client.search_runs(["0"], order_by=["start_time DESC"], max_results=1)
        check_mlflow(client, run.info.run_id, used)
        own = client.get_metric_history(run.info.run_id, "loss")
        # Those of one millisecond come in any order.
        assert sorted(item.step for item in own) == losses
        trainer.train()
        (again,) = client.search_runs(["0"], order_by=["start_time DESC"], max_results=1)
        assert again.info.run_id != run.info.run_id
        assert again.info.status == "FINISHED"
        for name, steps in (("loss", losses), (next(iter(NUMBERS)), sampled)):
            seen = client.get_metric_history(again.info.run_id, name)
            assert sorted(item.step for item in seen) == steps
        return
    if name == "wandb":
        rows = history(package.run)
    else:
        rows = [values for _, values in trackio_rows("huggingface")]
    assert [row["train/global_step"] for row in rows if "train/loss" in row] == losses
    scales = [row for row in rows if row.keys() >= NUMBERS]
    assert [row["train/global_step"] for row in scales] == sampled
    check_names(scales, used)


def test_unknown_logger_is_an_error() -> None:
    model, optimizer = new()
    with pytest.raises(TypeError, match=r"loggers='runs': unknown logger. Expected one"):
        attach(model, optimizer, ScaleMonitor(), loggers="runs")
    assert "forward" not in vars(model)


def test_tables_are_thinned_and_last_is_kept() -> None:
    steps = Thinning({"table": 8})
    taken = [step for step in range(64) if steps.due(step, complete=step == 33)]
    assert taken == [*range(8), 8, 10, 12, 14, 16, 20, 24, 28, 32, 33, 40, 48, 56]
    assert not steps.left_out(62) and steps.left_out(63) == {"table"}
    assert not steps.left_out(63)
