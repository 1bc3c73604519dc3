"""The command line, in this process, on runs of a few steps."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_unitscale import __version__
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.cli import UnitScaleCLI, entry_point, main, tensorboard_command
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.profiler import GraphProfile

ROOT = Path(__file__).parents[1]
UNIT_SCALED = ROOT / "configs/gpt_unit_scaled.yaml"
BASELINE = ROOT / "configs/gpt_baseline.yaml"


class Interrupt(pl.Callback):
    """Presses Ctrl-C after the third step, or fails there for another reason."""

    def __init__(self, fail: bool = False) -> None:
        self.fail = fail

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("out of luck") if self.fail else KeyboardInterrupt


@pytest.fixture(autouse=True)
def _keep_process_state() -> Iterator[None]:
    """Lightning ignores Ctrl-C for good once it has seen one; `main` extends the path."""
    handler, path = signal.getsignal(signal.SIGINT), list(sys.path)
    yield
    signal.signal(signal.SIGINT, handler)
    sys.path[:] = path


@pytest.fixture
def tiny(text_file: Path) -> list[str]:
    """Overrides that turn a configuration of the demo into a run of four steps on four batches."""
    options = {
        "model.width": 16,
        "model.depth": 1,
        "model.num_heads": 2,
        "model.context": 16,
        "model.warmup_steps": 1,
        "data.context": 16,
        "data.batch_size": 2,
        "data.val_samples": 4,
        "data.path": text_file,
        "trainer.max_steps": 4,
        "trainer.val_check_interval": 2,
        "trainer.log_every_n_steps": 1,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
    }
    return [f"--{name}={value}" for name, value in options.items()]


def _fit(config: Path, *overrides: str) -> None:
    main(["fit", f"--config={config}", *overrides])


def _saved_config(run: str) -> dict[str, Any]:
    return yaml.safe_load(Path(run, "config.yaml").read_text())


def test_fits_print_report_and_have_same_loss(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for config in (UNIT_SCALED, BASELINE):
        _fit(config, *tiny, "--trainer.callbacks.every_n_steps=1")
        report = capsys.readouterr().out
        assert re.search(r"\nblocks\.0 +\d+ of 11 ", report)  # the scale table
        assert "gradients within 2x of RMS 1" in report
        (found,) = re.findall(
            r"Validation loss: (\d\.\d{4}) after step 4 .*\d\.\d{4}, the unigram", report
        )
        losses.append(found)
        assert "\nScales tab: http://localhost:6006/#scales (while" in report
        assert report.rstrip().endswith("--logdir logs")
        assert list(Path("logs", config.stem, "version_0").glob("events.out.tfevents.*"))
    assert losses[0] == losses[1]


def test_overrides_reach_the_model_and_the_trainer(tiny: list[str]) -> None:
    _fit(BASELINE, *tiny, "--model.width=32", "--trainer.max_steps=1", "--seed_everything=5")
    (run,) = Path("logs/gpt_baseline").iterdir()
    config = _saved_config(str(run))
    assert config["model"]["init_args"]["width"] == 32
    assert config["trainer"]["max_steps"] == 1
    assert config["seed_everything"] == 5
    checkpoint = torch.load(run / "checkpoints/epoch=0-step=1.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["norm.weight"].shape == (32,)


def test_callbacks_can_be_left_out_and_added(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    added = "--trainer.callbacks+=lightning.pytorch.callbacks.LearningRateMonitor"
    _fit(UNIT_SCALED, *tiny, "--trainer.callbacks=null", added)
    (callback,) = _saved_config("logs/gpt_unit_scaled/version_0")["trainer"]["callbacks"]
    assert callback["class_path"].endswith("LearningRateMonitor")
    report = capsys.readouterr().out
    assert "blocks.0" not in report and "Scales tab" not in report
    assert "Validation loss" in report


def test_final_weights_are_validated(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _fit(BASELINE, *tiny, "--trainer.max_steps=3")
    assert "after step 3 " in capsys.readouterr().out
    _fit(BASELINE, *tiny, "--trainer.max_steps=3", "--trainer.limit_val_batches=0")
    assert "Validation loss" not in capsys.readouterr().out


def test_runs_repeat_exactly(tiny: list[str]) -> None:
    for _ in range(2):
        _fit(BASELINE, *tiny)
    first, second = (
        torch.load(f"logs/gpt_baseline/version_{i}/checkpoints/epoch=0-step=4.ckpt")["state_dict"]
        for i in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


# Lightning warns if the folder of checkpoints is not empty, as here.
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_second_run_can_reuse_folder(tiny: list[str]) -> None:
    fixed = "--trainer.logger.version=mine"
    _fit(BASELINE, *tiny, fixed, "--trainer.max_steps=1")
    _fit(BASELINE, *tiny, fixed, "--trainer.max_steps=1", "--model.width=32")
    assert _saved_config("logs/gpt_baseline/mine")["model"]["init_args"]["width"] == 32


# A run from a checkpoint has a folder of its own, which Lightning remarks on.
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_run_is_resumed_from_a_checkpoint(tiny: list[str]) -> None:
    _fit(UNIT_SCALED, *tiny)
    _fit(UNIT_SCALED, *tiny, "--trainer.max_steps=2", "--model.decay_steps=4")
    checkpoint = "logs/gpt_unit_scaled/version_1/checkpoints/epoch=0-step=2.ckpt"
    _fit(UNIT_SCALED, *tiny, f"--ckpt_path={checkpoint}")
    whole, resumed = (
        torch.load(f"logs/gpt_unit_scaled/version_{i}/checkpoints/epoch=0-step=4.ckpt")
        for i in (0, 2)
    )
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][name]), name


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_validate_test_and_predict_subcommands(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _fit(UNIT_SCALED, *tiny)
    capsys.readouterr()
    checkpoint = "logs/gpt_unit_scaled/version_0/checkpoints/epoch=0-step=4.ckpt"
    for subcommand, loss in (("validate", "val_loss"), ("test", "test_loss"), ("predict", "")):
        main([subcommand, f"--config={UNIT_SCALED}", *tiny, f"--ckpt_path={checkpoint}"])
        output = capsys.readouterr().out
        assert loss in output
        assert "Validation loss" not in output  # the report is about training


def test_interrupted_run_reports_and_exits_cleanly(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _fit(BASELINE, *tiny, f"--trainer.callbacks+={__name__}.Interrupt")
    assert stopped.value.code == 130
    report = capsys.readouterr().out
    assert "after step 2 " in report
    assert "--logdir logs" in report
    assert Path("logs/gpt_baseline/version_0/checkpoints/epoch=0-step=3.ckpt").exists()


def test_failed_run_has_no_report(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    callback = [f"--trainer.callbacks+={__name__}.Interrupt", "--trainer.callbacks.fail=true"]
    with pytest.raises(RuntimeError, match="out of luck"):
        _fit(BASELINE, *tiny, *callback)
    assert "--logdir" not in capsys.readouterr().out


def test_missing_path_is_a_clear_error(tiny: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^`path=nowhere`: there is no such file or folder"):
        _fit(BASELINE, *tiny, "--data.path=nowhere")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("method", {"method": "u-mup", "loss_mult": -1.0}, r"^loss_mult=-1.0: not a factor. Exp"),
     ("precision", {"exclude": [""]}, r"^exclude=\[''\]: '' is not a pattern. Expected globs"),
     ("simulate", {"format": "FP7"}, r"^format='FP7': unknown number format. Expected one of"),
     ("remat", "many", r"^remat='many': not a budget. Expected bytes")],
)  # fmt: skip
def test_bad_callback_option_is_a_clear_error(name: str, value: Any, expected: str) -> None:
    scaled = {"class_path": "lightning_unitscale.UnitScaleCallback", "init_args": {name: value}}
    model = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    with pytest.raises(ValueError, match=expected):
        UnitScaleCLI(args={"model": model, "trainer": {"callbacks": [scaled]}}, run=False)


def test_printed_configuration_shows_the_options_of_a_callback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = {"class_path": "lightning_unitscale.Rules", "init_args": {"method": "u-mup"}}
    fp8 = {"class_path": "lightning_unitscale.FP8", "init_args": {"exclude": ["head"]}}
    init_args = {"method": rules, "precision": fp8}
    scaled = {"class_path": "lightning_unitscale.UnitScaleCallback", "init_args": init_args}
    model = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": model, "trainer": {"callbacks": [scaled]}}))
    with pytest.raises(SystemExit):
        main(["fit", f"--config={config}", "--print_config"])
    (callback,) = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    printed = callback["init_args"]
    assert printed["method"]["method"] == "u-mup" and printed["method"]["attention_mult"] == 1.0
    assert printed["precision"] == {
        "exclude": ["head"], "gradient_format": "E4M3FN", "evaluation": False, "grid": "moving",
        "on_misfit": "leave", "exempt": [], "max_damage": 0.5, "measured_from": 1024,
    }  # fmt: skip
    assert printed["lr_scaling"] == "auto" and len(printed) == 12


def test_unknown_option_is_an_error(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _fit(BASELINE, *tiny, "--trainer.max_stepps=3")
    assert "max_stepps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "expected"),
    [("schedule=1F2B", r"schedule='1F2B': unknown. Expected one of GPipe, 1F1B"),
     ("num_microbatches=0", r"num_microbatches=0: not a count. Expected a whole number")],
)  # fmt: skip
def test_bad_strategy_option_is_a_clear_error(tiny: list[str], option: str, expected: str) -> None:
    """A strategy may be a name, whatever the type of the argument."""
    given = {"schedule": "GPipe", "num_microbatches": "2", **dict([option.split("=")])}
    options = [f"--trainer.strategy.init_args.{name}={value}" for name, value in given.items()]
    strategy = "--trainer.strategy=lightning_unitscale.PipelineStrategy"
    with pytest.raises(ValueError, match=rf"^{expected}"):
        _fit(BASELINE, *tiny, strategy, *options, "--traceback")
    with pytest.raises(SystemExit, match=rf"^lightning-unitscale: {expected}.* \(--traceback"):
        _fit(BASELINE, *tiny, strategy, *options)


def test_missing_cli_extra_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_point, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"jsonargparse.*pip install 'lightning-unitscale\[cli\]'"):
        main(["fit"])


def test_classes_in_current_folder_are_found(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A console script puts its own folder first on the path, not the current one."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    Path("my_callbacks.py").write_text(
        "import lightning.pytorch as pl\n"
        "class Touch(pl.Callback):\n"
        "    def on_fit_end(self, trainer, pl_module): open('touched', 'w').close()\n"
    )
    _fit(BASELINE, *tiny, "--trainer.callbacks+=my_callbacks.Touch")
    assert Path("touched").exists()


class TestTensorboardCommand:
    def _command(
        self, monkeypatch: pytest.MonkeyPatch, *loggers: Any, path: str = ""
    ) -> str | None:
        monkeypatch.setenv("PATH", path)
        return tensorboard_command(SimpleNamespace(loggers=list(loggers)))

    def test_logdir_is_that_of_tensorboard_logger(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = self._command(monkeypatch, CSVLogger("csv"), TensorBoardLogger("my logs", "run"))
        assert command is not None
        assert command.endswith("--logdir 'my logs'")
        command = self._command(monkeypatch, TensorBoardLogger(str(tmp_path.parent), "run"))
        assert command is not None
        assert command.endswith(f"--logdir {tmp_path.parent}")

    def test_logdir_is_never_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = self._command(monkeypatch, TensorBoardLogger(str(tmp_path), "lightning_logs"))
        assert command is not None
        assert command.endswith("--logdir lightning_logs")

    def test_tensorboard_of_current_environment_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        environment = tmp_path / ".venv/bin"
        environment.mkdir(parents=True)
        program = environment / "tensorboard"
        monkeypatch.setattr(sys, "executable", str(environment / "python"))
        logger = TensorBoardLogger("logs")
        command = self._command(monkeypatch, logger)
        assert command == f"{environment}/python -m tensorboard.main --logdir logs"
        program.touch(mode=0o755)
        assert self._command(monkeypatch, logger) == ".venv/bin/tensorboard --logdir logs"
        command = self._command(monkeypatch, logger, path=str(environment))
        assert command == "tensorboard --logdir logs"

    def test_no_command_without_tensorboard_logger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self._command(monkeypatch, CSVLogger("csv")) is None


class TestProfile:
    """`profile` on the configuration of `fit`: a real process, and the rest in this one."""

    @pytest.mark.slow
    def test_profile_process_does_not_train(self, tiny: list[str]) -> None:
        command = [sys.executable, "-m", "lightning_unitscale", "profile", f"--config={BASELINE}"]
        options = ["--json=profile.json", "--plot=plot.png", "--budget_bytes=50000000"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, *tiny, *options], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert "blocks.0.mlp.up.linear" in done.stdout
        assert re.search(r"Peak \S+ \wiB on cpu in the \w+ pass of \S+", done.stdout)
        assert re.search(r"Largest batch within 50000000 bytes: \d+", done.stdout)
        profile = GraphProfile.load("profile.json")
        assert profile.batch_size == 2
        assert 1.9 < profile.optimizer_bytes / profile.parameter_bytes < 2.1
        assert Path("plot.png").stat().st_size > 10_000
        assert not Path("logs").exists()

    def test_profile_for_gpu_runs_without_gpu(
        self, tiny: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ["--trainer.accelerator=gpu", "--trainer.precision=bf16-mixed", "--limit=3"]
        main(["profile", f"--config={UNIT_SCALED}", *tiny, *options])
        printed = capsys.readouterr().out
        assert re.search(r" on cuda \(.+\) in the ", printed)
        assert "more nodes)" in printed

    @pytest.mark.parametrize("device", ["t4", "cuda:t4"])
    def test_profile_for_gpu_by_name(
        self, device: str, tiny: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["profile", f"--config={BASELINE}", *tiny, f"--device={device}", "--limit=3"])
        assert " on cuda (T4 16GB) in the " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--json=nowhere/profile.json", "json='nowhere/profile.json': .*nowhere is not a folder"),
        ("--plot=logs", "plot='logs': .*it is a folder"),
        ("--plot=a.mp4", "suffix='mp4': no format of pictures, in plot='a.mp4'"),
        ("--sort_by=size", "sort_by='size': nodes have no such number"),
        ("--limit=0", "limit=0: not a count"),
        ("--budget_bytes=-1", "budget_bytes=-1: not a count"),
    ],
)
def test_bad_profile_option_fails_early(option: str, text: str, tiny: list[str]) -> None:
    Path("logs").mkdir()
    with pytest.raises(SystemExit, match=rf"^lightning-unitscale: {text}.*\. Expected .*\. \w+ "):
        main(["profile", f"--config={BASELINE}", *tiny, option])


_SHARDED = """
import lightning.pytorch as pl, torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
class Whole(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
        self.layers = torch.nn.Sequential(*layers, torch.nn.ReLU())
    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 64), batch_size=4)
class Sharded(Whole):
    def configure_model(self):
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for index in (0, 2):
            plan = {f"{index}": ColwiseParallel(), f"{index + 1}": RowwiseParallel()}
            parallelize_module(self.layers, tensor, plan)
        fully_shard(self.layers, mesh=data)
"""
_SHARDED_CONFIG = """
trainer:
  accelerator: ACCELERATOR
  devices: 8
  num_nodes: NODES
  strategy:
    class_path: lightning.pytorch.strategies.ModelParallelStrategy
    init_args:
      data_parallel_size: DATA
      tensor_parallel_size: 2
"""
_BYTES = 4 * 64 * 64 * 4


class TestProfileOfSeveralDevices:
    """`profile` of a configuration for devices that are not there."""

    @pytest.fixture
    def project(self, tmp_path: Path) -> str:
        """Name of a module with LightningModules, in the current folder."""
        name = f"sharded_of_{tmp_path.name}"  # another module for each case
        Path(f"{name}.py").write_text(_SHARDED)
        return name

    def _profile(
        self, model: str, *options: str, accelerator: str = "cpu", data: int = 4, num_nodes: int = 1
    ) -> None:
        config = _SHARDED_CONFIG.replace("ACCELERATOR", accelerator).replace("DATA", str(data))
        Path("run.yaml").write_text(config.replace("NODES", str(num_nodes)))
        main(["profile", "--config=run.yaml", f"--model={model}", *options])

    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        ("accelerator", "device", "num_nodes"), [("cpu", "cpu", 1), ("gpu", "cuda", 8)]
    )
    def test_profile_of_sharded_ranks(
        self,
        accelerator: str,
        device: str,
        num_nodes: int,
        project: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        ranks, data = 8 * num_nodes, 4 * num_nodes
        options = ["--json=profile.json", "--budget_bytes=100000000"]
        self._profile(
            f"{project}.Sharded", *options, accelerator=accelerator, data=data, num_nodes=num_nodes
        )
        printed = capsys.readouterr().out
        assert f" on each of {ranks} {device} ranks " in printed
        assert re.search(r"^unsharded +\d", printed, re.MULTILINE)
        assert re.search(r"Largest batch within 100000000 bytes: \d\d+", printed)
        profile = GraphProfile.load("profile.json")
        assert profile.parameter_bytes == profile.gradient_bytes == _BYTES // ranks
        assert profile.batch_size == 4
        assert not torch.distributed.is_initialized()

    def test_indivisible_mesh_sizes_are_an_error(self, project: str) -> None:
        with pytest.raises(RuntimeError, match="`data_parallel_size=3` and `tensor_"):
            self._profile(f"{project}.Sharded", data=3)
        assert not torch.distributed.is_initialized()

    def test_module_without_configure_model_is_an_error(self, project: str) -> None:
        with pytest.raises(SystemExit, match="Whole has no configure_model"):
            self._profile(f"{project}.Whole")

    def test_sharded_profile_needs_number_of_devices(self, project: str) -> None:
        with pytest.raises(SystemExit, match="needs the number of devices"):
            self._profile(f"{project}.Sharded", "--trainer.devices=auto")

    def test_ddp_profile_includes_buckets(
        self, project: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ["--trainer.strategy=ddp", "--trainer.accelerator=cpu", "--json=profile.json"]
        main(["profile", f"--model={project}.Whole", "--trainer.devices=4", *options])
        peak = GraphProfile.load("profile.json").peak_bytes
        assert (
            "DDP: the whole model is on each of 4 devices; with its buckets of gradients, "
            f"{format_bytes(_BYTES)}, the peak is {format_bytes(peak + _BYTES)}"
        ) in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("strategy", "instead"),
        [
            ("fsdp", "Use ModelParallelStrategy"),
            ("deepspeed_stage_3", "Use ModelParallelStrategy"),
            ("pipeline", "Use explain-pipeline"),
        ],
    )
    def test_unsupported_strategies_are_an_error(
        self, strategy: str, instead: str, project: str
    ) -> None:
        with pytest.raises(SystemExit, match=instead):
            main(
                ["profile", f"--model={project}.Whole", f"--trainer.strategy={strategy}",
                 "--trainer.devices=2"]
            )  # fmt: skip

    def test_single_device_profile(self, project: str, capsys: pytest.CaptureFixture[str]) -> None:
        main(["profile", f"--model={project}.Whole", "--trainer.accelerator=cpu"])
        printed = capsys.readouterr().out
        assert " on cpu in the " in printed
        assert "DDP" not in printed

    def test_parameter_dtype_follows_precision(self, project: str) -> None:
        options = ["--trainer.precision=bf16-true", "--json=profile.json"]
        main(["profile", f"--model={project}.Whole", "--trainer.accelerator=cpu", *options])
        assert GraphProfile.load("profile.json").parameter_bytes == _BYTES // 2


class TestExplainPipeline:
    """`explain-pipeline` on the configuration of a run that it does not start."""

    def test_explain_pipeline_prints_table_and_timeline(
        self, tiny: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = f"--config={ROOT / 'configs/gpt_pipeline.yaml'}"
        options = ["--num_stages=2", "--model.depth=2", "--data.batch_size=4"]
        main(["explain-pipeline", config, *tiny, *options])
        printed = capsys.readouterr().out
        assert re.search(r"step: \d+\.\d+ ms, of which the bubble is \d+\.\d%", printed)
        assert "stage 1 |." in printed
        assert not Path("logs").exists()

    @pytest.mark.parametrize(
        ("option", "text"),
        [
            ("--num_stages=100", "num_stages=100: num_microbatches is .* 2 samples .* 200 equal"),
            ("--num_stages=0", "num_stages=0: not a count"),
            ("--num_microbatches=-2", "num_microbatches=-2: not a count"),
        ],
    )
    def test_bad_explain_pipeline_option_is_a_clear_error(
        self, option: str, text: str, tiny: list[str]
    ) -> None:
        with pytest.raises(
            SystemExit, match=rf"^lightning-unitscale: {text}.*. Expected .*. Pass "
        ):
            main(["explain-pipeline", f"--config={BASELINE}", *tiny, option])

    def test_more_stages_than_operations_is_an_error(self, tiny: list[str]) -> None:
        options = ["--num_stages=900", "--num_microbatches=2"]
        with pytest.raises(SystemExit, match=r"num_stages=900: the captured graph can be cut at"):
            main(["explain-pipeline", f"--config={BASELINE}", *tiny, *options])

    def test_indivisible_batch_is_an_error(self, tiny: list[str]) -> None:
        config = f"--config={BASELINE}"
        with pytest.raises(SystemExit, match="num_microbatches=3: a batch of 2 samples"):
            main(["explain-pipeline", config, *tiny, "--num_microbatches=3"])


_BREAKING = """
import lightning.pytorch as pl, torch
class Printing(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    def training_step(self, batch):
        first, second = self.layers  # no module with most of the parameters is called
        loss = second(first(batch)).square().mean()
        print("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4)
"""


@pytest.mark.parametrize("shows_traceback", [False, True])
def test_uncapturable_step_error_has_three_sentences(
    shows_traceback: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"breaking_{shows_traceback}"  # another module for each case
    file = tmp_path / f"{name}.py"
    file.write_text(_BREAKING)
    line = _BREAKING.splitlines().index('        print("loss", loss)') + 1
    words = ["explain-pipeline", f"--model={name}.Printing", "--trainer.accelerator=cpu"]
    kind = CaptureError if shows_traceback else SystemExit
    with pytest.raises(kind) as found:
        main([*words, *(["--traceback"] if shows_traceback else [])])
    text = str(found.value)
    assert "Printing.training_step cannot be captured as one graph: `print(" in text
    assert f"{file}:{line} breaks the graph. " in text
    assert "Keep it out of training_step" in text
    assert len(text) < 500 + len(str(file))


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["profile"], SystemExit, 'READING:LINE depends on the values of a tensor'),
        (["profile", "--traceback"], RuntimeError, 'READING:LINE depends on the values'),
    ],
)  # fmt: skip
def test_unplannable_step_error_has_no_traceback(
    words: list[str], kind: type[BaseException], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code = _BREAKING.replace('print("loss", loss)', "loss.item()")
    file = tmp_path / f"reading_{len(words)}_{len(words[0])}.py"
    file.write_text(code)
    line = code.splitlines().index("        loss.item()") + 1
    model = [f"--model={file.stem}.Printing", "--trainer.accelerator=cpu"]
    with pytest.raises(kind) as found:
        main([words[0], *model, *words[1:]])
    assert said.replace("READING:LINE", f"`loss.item()` at {file}:{line}") in str(found.value)


class Manual(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_step_with_manual_optimization_cannot_be_planned() -> None:
    with pytest.raises(SystemExit, match=r"Manual has manual optimization, so .*\. Expected aut"):
        main(["profile", f"--model={__name__}.Manual", "--trainer.accelerator=cpu"])


@pytest.mark.parametrize("kind", ["RuntimeError", "ValueError"])
def test_user_errors_keep_traceback(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = _BREAKING.replace('print("loss", loss)', f'raise {kind}("mine=1: bad. Expected good")')
    (tmp_path / f"raising_{kind}.py").write_text(code)
    with pytest.raises((RuntimeError, ValueError), match="mine"):
        main(["profile", f"--model=raising_{kind}.Printing", "--trainer.accelerator=cpu"])


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize(
    ("callback", "text"),
    [
        ("RematCallback.budget=plenty", "budget='plenty': not a budget. Expected bytes"),
        ("UnitScaleCallback.recalibrate=-3", "recalibrate=-3: .* Expected "),
        ("ScaleMonitor.every_n_steps=0", "every_n_steps=0: .* Expected "),
        # Only the first step shows that.
        ("RematCallback.budget=16", "budget=16 B is too small. The smallest achievable peak is "),
    ],
)
def test_bad_callback_argument_has_no_traceback(
    callback: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"wrong_{len(callback)}"
    (tmp_path / f"{name}.py").write_text(_BREAKING.replace('print("loss", loss)', "pass"))
    option, value = callback.split(".", 1)
    words = [
        "fit", f"--model={name}.Printing", "--trainer.accelerator=cpu", "--trainer.max_steps=1",
        "--trainer.logger=false", "--trainer.enable_checkpointing=false",
        f"--trainer.callbacks+=lightning_unitscale.{option}", f"--trainer.callbacks.{value}",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match=rf"^lightning-unitscale: {text}"):
        main(words)
    with pytest.raises(ValueError, match=rf"^{text}"):
        main([*words, "--traceback"])


_STEPS = """
import lightning.pytorch as pl, torch
class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    def training_step(self, ARGUMENTS):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4)
"""


@pytest.mark.slow_cases(4)
@pytest.mark.parametrize("command", ["profile", "explain-pipeline"])
@pytest.mark.parametrize("arguments", ["batch", "batch, i", "batch, batch_idx=3"])
def test_step_arguments_can_have_any_names(
    command: str,
    arguments: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"of_{tmp_path.name}"  # another module for each case
    Path(f"{name}.py").write_text(_STEPS.replace("ARGUMENTS", arguments))
    main([command, f"--model={name}.Plain", "--trainer.accelerator=cpu"])
    assert "layers.0" in capsys.readouterr().out


COMMANDS = (
    *("fit", "validate", "test", "predict", "profile", "fit-in", "precision"),
    *("explain-pipeline", "compare", "diagnose", "report"),
)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    printed = capsys.readouterr().out
    assert all(re.search(rf"^  {command} ", printed, re.MULTILINE) for command in COMMANDS)
    with pytest.raises(SystemExit, match=f"no command. Expected one of {', '.join(COMMANDS)}\\."):
        main([])


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"lightning-unitscale {__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [("compare", "compare: the following arguments are required: RUN_A, RUN_B"),
     ("diagnose nothere", "diagnose: RUN_DIR='nothere': no such folder"),
     ("report empty --nonsense", "report: unrecognized arguments: --nonsense"),
     ("fit --nonsense", "unrecognized arguments: --nonsense"),
     ("fit --config nothere.yaml", "config: File does not exist: "),
     ("profile --device h1000", r"profile: device: Expected one of \['cpu', .*'t4'\]. Got h1000"),
     ("fit-in --max_shards x", "fit-in: max_shards: Expected int. Got value: x"),
     ("profile --model nothere.Mod", "model: Problem with given class_path 'nothere.Mod': No mod"),
     ("fit --trainer.callbacks UnitScaleCallback --trainer.callbacks.method nope",
      r"fit: trainer.callbacks: .*Callback': method: Expected one of \['lossless', .*Got nope"),
     ("fit --trainer.callbacks+ ScaleMonitor --trainer.callbacks.every_n_steps x",
      "ScaleMonitor': every_n_steps: Expected int. Got value: x. See lightning-unitscale fit"),
     ("fit --model {model} --ckpt_path LICENSE", "ckpt_path='LICENSE': not a checkpoint"),
     ("precision --model {model} --ckpt_path nothere", "ckpt_path='nothere': the model cannot be"),
     ("validate --model {model} --ckpt_path nothere", "ckpt_path='nothere': not a checkpoint"),
     ("validate --model {model} --ckpt_path LICENSE", "ckpt_path='LICENSE': not a checkpoint"),
     ("fit --model {model} --trainer.accelerator=x", "invalid accelerator name: `accelerator='x'`"),
     ("fit-in --model {model} --trainer.accelerator=x", "accelerator='x': unknown"),
     ("fit --trainer.precision=x", r"precision: Expected int or one of \['trans.*\]. Got x. See"),
     ("profile --model {model} --sort_by x", "sort_by='x': nodes have no such number")],
)  # fmt: skip
def test_usage_errors_are_one_line_with_exit_status_2(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "lightning.pytorch.demos.boring_classes.BoringModel"
    with pytest.raises(SystemExit) as stopped:
        main(words.format(model=model).split())
    lines = [line for line in capsys.readouterr().err.splitlines() if "Seed set" not in line]
    assert stopped.value.code == 2 and len(lines) == 1 and re.search(expected, lines[0]), lines


def test_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    listed = ", ".join(COMMANDS)
    with pytest.raises(SystemExit, match=rf"bogus: no such command. Expected one of {listed}\."):
        main(["bogus"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"# model: Mod", "fit: config: the file has no options. Expected keys such as `model`"),
     ("model: Mod".encode("utf-16"), "config: not UTF-8 text .* Save the file as UTF-8. See"),
    ],
)  # fmt: skip
def test_wrong_files_are_one_line(
    content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(SystemExit):
        main(["fit", f"--config={tmp_path / 'run.yaml'}"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(expected, error), error


def test_truncated_checkpoint_is_an_error(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "last.ckpt").read_bytes()[:-30])
    model = "--model=lightning.pytorch.demos.boring_classes.BoringModel"
    with pytest.raises(SystemExit, match=r"not a checkpoint\. Expected a complete"):
        main(["fit", model, f"--ckpt_path={tmp_path / 'last.ckpt'}"])


@dataclass
class Small:
    width: int = 1


@dataclass
class Large:
    depth: int = 1


class Sized(BoringModel):
    def __init__(self, size: Small | Large) -> None:
        super().__init__()
        print(f"size: {size}")


def test_argument_with_several_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = {"accelerator": "cpu", "fast_dev_run": 1, "enable_model_summary": False}
    model = {"class_path": f"{__name__}.Sized", "init_args": {"size": {"depth": 3}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": model, "trainer": trainer}))
    main(["fit", f"--config={tmp_path / 'run.yaml'}"])
    assert "size: Large(depth=3)" in capsys.readouterr().out


def test_reader_that_ends_early_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as stopped:
            main(["--version"])
    assert stopped.value.code == 141


def test_interrupted_reading_has_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry_point, "read_run", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(["diagnose", str(tmp_path)])
    assert stopped.value.code == 130
