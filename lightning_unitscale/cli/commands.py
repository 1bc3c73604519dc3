"""Run the command line: `lightning-unitscale fit --config run.yaml`, a CLI with a report."""

import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from lightning_unitscale import __version__
from lightning_unitscale.arguments import check_count, check_file
from lightning_unitscale.callbacks import ScaleMonitor
from lightning_unitscale.callbacks.lightning_steps import step_arguments
from lightning_unitscale.capture.fallback import Refusal
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.cli.profiled import ProfiledJob, profiled_job
from lightning_unitscale.memory.gpus import DEVICE_WORDS, device_type, full_name
from lightning_unitscale.memory.profile_report import check_sort_by
from lightning_unitscale.patching import nothing
from lightning_unitscale.pipeline.explain import explain_step
from lightning_unitscale.profiler import profile_graph
from lightning_unitscale.tensorboard import writer
from lightning_unitscale.tensorboard.run_report import main as report_command

# The exit status after Ctrl-C.
_EXIT_INTERRUPTED = 130
_TRACEBACK = "--traceback"
_PACKAGE = Path(__file__).resolve().parent.parent
# The form of argument errors: "argument=value: what is wrong. Expected ...".
_ARGUMENT_ERROR = re.compile(r"^[\s-]*(\w+=.*: .*[Ee]xpected .*)", re.MULTILINE)

_COMMANDS = {
    "fit": "train, then show the scale of every tensor and the validation loss",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "predict on the prediction data",
    "profile": "predict memory and operations of a training step without running it",
    "explain-pipeline": "estimate the costs of pipeline stages without running them",
    "report": "show the scales of finished runs as a picture, a page and a table",
}
# These only plan, so their refusals are answers for the user.
_PLANNING = ("profile", "explain-pipeline")
_USAGE = f"usage: lightning-unitscale {{{','.join(_COMMANDS)}}} ..."


def main(args: Sequence[str] | None = None) -> None:
    """Run `fit`, `validate`, `test`, `predict`, `profile`, `explain-pipeline` or `report`."""
    words = list(sys.argv[1:] if args is None else args)
    shows_traceback = _TRACEBACK in words
    words = [word for word in words if word != _TRACEBACK]
    if words in (["--help"], ["-h"]):
        print(_help())
        return
    if words == ["--version"]:
        print(f"lightning-unitscale {__version__}")
        return
    if not words:
        raise SystemExit(f"{_USAGE}\nlightning-unitscale: no command; try --help")
    if not words[0].startswith("-") and words[0] not in _COMMANDS:
        raise SystemExit(
            f"lightning-unitscale: {words[0]}: no such command. Expected one of "
            f"{', '.join(_COMMANDS)}. Run one of them with --help to see its options."
        )
    if words[:1] == ["report"]:
        report_command(words[1:])
        return
    # All of jsonargparse[signatures]: without one of them Lightning fails late or obscurely.
    needed = ("jsonargparse", "docstring_parser", "typeshed_client")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise SystemExit(
            f"lightning-unitscale: {', '.join(missing)} not found. The command line needs the "
            "extra `cli`. Run: pip install 'lightning-unitscale[cli]'"
        )
    # A console script has only its own folder on the path. We add the current one, as `python -m`
    # does, so that a configuration can name classes of its project.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if words[:1] == ["profile"]:
            ProfileCLI(words[1:], run=False).profile()
        elif words[:1] == ["explain-pipeline"]:
            ExplainPipelineCLI(words[1:], run=False).explain()
        else:
            UnitScaleCLI(args=words if shows_traceback or args is not None else None)
    except Exception as error:
        if shows_traceback or not _is_answer(error, plans=words[0] in _PLANNING):
            raise
        raise SystemExit(f"lightning-unitscale: {error} ({_TRACEBACK} shows where)") from None
    except KeyboardInterrupt:  # before or after the training, which handles Ctrl-C itself
        raise SystemExit(_EXIT_INTERRUPTED) from None


def _is_answer(error: Exception, *, plans: bool) -> bool:
    """Check whether an error answers the user: the request is wrong or impossible."""
    if isinstance(error, (CaptureError, Refusal)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not Path(frames[-1].filename).resolve().is_relative_to(_PACKAGE):
        return False  # an error of the user's code or of a library
    if isinstance(error, (ValueError, TypeError)):
        return _ARGUMENT_ERROR.search(str(error)) is not None
    kinds = (MisconfigurationException, RuntimeError) if plans else MisconfigurationException
    return isinstance(error, kinds)


def _help() -> str:
    """Return the commands of all parsers. Each parser has only its own."""
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {what}" for name, what in _COMMANDS.items())
    return f"""{_USAGE}

Unit scaling for PyTorch Lightning, from YAML: COMMAND --config FILE

commands (each with --help):
{commands}

options:
  {"--help":{width}}  show this page
  {"--version":{width}}  {__version__}
  {_TRACEBACK:{width}}  with a command: also show the traceback of errors in the request"""


class UnitScaleCLI(LightningCLI):
    """A LightningCLI for any model and data module that ends `fit` with a report.

    With a `ScaleMonitor` among the callbacks, the report shows the scale of every tensor. It also
    shows the validation loss (`val_loss`) and the command for TensorBoard.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        self._record = _FitRecord()
        super().__init__(
            run=run,
            trainer_defaults={"callbacks": self._record},
            seed_everything_default=1,
            parser_kwargs={"prog": "lightning-unitscale"},
            # Loggers make a new folder for each run. A user who repeats a folder name or resumes
            # wants to overwrite.
            save_config_kwargs={"overwrite": True},
            args=args,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        # Lightning warns if `args` are given to a process with arguments of its own.
        if args is None or isinstance(args, list):
            self.config = parser.parse_args(args)
        else:
            self.config = parser.parse_object(args)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            # For an optional type, jsonargparse replaces the constructor's message by a list of the
            # possible types.
            if (complaint := _ARGUMENT_ERROR.search(str(error))) is not None:
                raise type(error)(complaint[1]) from None
            cause: BaseException = error
            while cause.__cause__ is not None and "Union subtypes" in str(cause):
                cause = cause.__cause__
            raise cause from None

    def fit(self, **kwargs: Any) -> None:
        """Train, and report also after Ctrl-C."""
        try:
            self.trainer.fit(**kwargs)
        except SystemExit:
            # Lightning turns Ctrl-C into an exit with status 1, after it has called the callbacks.
            if not self._record.was_interrupted:
                raise
            self._print_report(self._scale_table())
            raise SystemExit(_EXIT_INTERRUPTED) from None

    def after_fit(self) -> None:
        """Report on the run. Validate its last weights first, if they have not been yet."""
        trainer, record = self.trainer, self._record
        table = self._scale_table()  # as it was in training, since a validation is a separate run
        is_stale = record.validation_step != trainer.global_step
        # Only for text. Validation of other data may be long, and was not requested.
        if is_stale and trainer.enable_validation and self._unigram_entropy_nats() is not None:
            trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
        self._print_report(table)

    def _scale_table(self) -> str:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        monitors = (callback for callback in callbacks if isinstance(callback, ScaleMonitor))
        return next((monitor.table() for monitor in monitors), "")

    def _unigram_entropy_nats(self) -> float | None:
        return getattr(self.datamodule, "unigram_entropy_nats", None)

    def _print_report(self, table: str) -> None:
        if not self.trainer.is_global_zero:
            return
        lines = ["", table] if table else [""]
        if (loss := self._record.validation_loss) is not None:
            line = f"Validation loss: {loss:.4f} after step {self._record.validation_step}"
            if (entropy := self._unigram_entropy_nats()) is not None:
                line += f" (a model that ignores the context: {entropy:.4f}, the unigram entropy)"
            lines.append(line)
        if opening := tensorboard_command(self.trainer):
            if table:
                lines.append(f"Scales tab: {writer.SCALES_URL} (while TensorBoard runs)")
            lines.append(f"TensorBoard: {opening}")
        print("\n".join(lines), flush=True)


class ProfileCLI(UnitScaleCLI):
    """Estimate memory and operations of a training step: `profile --config run.yaml`.

    The configuration is that of `fit`. Only the trainer's precision, accelerator type, strategy and
    numbers of devices and nodes count. The devices need not exist here. Nothing is trained, logged
    or saved.
    """

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--device",
            type=Literal[DEVICE_WORDS] | None,
            help="Device whose kernels are simulated; by default the trainer's accelerator. "
            "The device need not exist here.",
        )
        parser.add_argument("--sort_by", default="saved_bytes", help="Column to sort nodes by.")
        parser.add_argument("--limit", type=int, default=20, help="Number of nodes to show.")
        parser.add_argument("--json", type=str | None, help="JSON file to write the profile to.")
        parser.add_argument("--plot", type=str | None, help="File to draw the live bytes to.")
        parser.add_argument(
            "--budget_bytes", type=int | None, help="Also find the largest batch within it."
        )
        parser.add_argument("--ckpt_path", type=str | None, help="As in `fit`, but ignored.")

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.config.trainer
        gpus = ("gpu", "cuda") if not torch.cuda.is_available() else ("gpu", "cuda", "auto")
        default = "cuda" if trainer.accelerator in gpus else "cpu"
        self._device = full_name(self.config.device or default)
        self._check_options()
        self._job = job = self._profiled_job()
        # The simulated devices need not exist here, and no run happens.
        trainer.accelerator, trainer.strategy = "cpu", job.strategy
        trainer.devices, trainer.num_nodes = job.num_devices, job.num_nodes
        trainer.logger, trainer.callbacks = False, None
        trainer.enable_checkpointing = False
        if trainer.max_epochs is None:  # only `fit` sets it
            trainer.max_epochs = 1000 if trainer.max_steps == -1 else -1

    def _check_options(self) -> None:
        """Refuse options that would otherwise fail after the step has been profiled."""
        for name in ("json", "plot"):
            if self.config[name] is not None:
                check_file(name, self.config[name])
        for name in ("limit", "budget_bytes"):
            if self.config[name] is not None:
                check_count(name, self.config[name])
        check_sort_by(self.config.sort_by)

    def _profiled_job(self) -> ProfiledJob:
        trainer = self.config.trainer
        return profiled_job(trainer.strategy, trainer.devices, trainer.num_nodes)

    def profile(self) -> None:
        """Profile the first training batch, and print its costs."""
        model, context = self.model, self.trainer.precision_plugin.forward_context
        with self._job.ranks(self.trainer, model, device_type(self._device)):
            batch = self._first_batch()
            # Outside a loop of the trainer there is no place to log to.
            for name in ("log", "log_dict"):
                model.__dict__[name] = nothing
            profile = profile_graph(
                model,
                *step_arguments(model, "training_step", batch, 0),
                device=self._device,
                optimizer=self._optimizer(),
                method="training_step",
                context=context,
            )
            print(f"{profile.module_table(depth=2)}\n")
            print(profile.table(self.config.sort_by, self.config.limit))
            print(f"\n{profile.totals()}")
            if remark := self._job.remark(profile):
                print(remark)
            if (budget := self.config.budget_bytes) is not None:
                print(f"Largest batch within {budget} bytes: {profile.max_batch_size(budget)}")
            if self.config.json is not None:
                profile.save(self.config.json)
            if self.config.plot is not None:
                profile.plot(self.config.plot)

    def _first_batch(self) -> Any:
        data, model = self.datamodule, self.model
        model.trainer = self.trainer
        if data is not None:
            data.trainer = self.trainer
        for hooks in filter(None, (data, model)):
            hooks.prepare_data()
            hooks.setup("fit")
        # As in `fit`, so that a schedule can read the length of the run from the trainer.
        self.trainer._data_connector.attach_data(model, datamodule=data)
        self._job.configure(self.trainer, model, device_type(self._device))
        loader = (model if data is None else data).train_dataloader()
        return self.trainer.precision_plugin.convert_input(next(iter(loader)))

    def _optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer of the model. Its schedule costs nothing."""
        optimizers = self.model.configure_optimizers()
        if isinstance(optimizers, Mapping):
            optimizers = optimizers["optimizer"]
        while isinstance(optimizers, (list, tuple)):
            first = next(iter(optimizers), None)
            if len(optimizers) > 1 and not isinstance(first, (list, tuple)):
                print(f"Of {len(optimizers)} optimizers, the step is profiled with the first.")
            optimizers = first["optimizer"] if isinstance(first, Mapping) else first
        return optimizers


class ExplainPipelineCLI(ProfileCLI):
    """Plan the stages: `explain-pipeline --config run.yaml --num_stages 4`."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--num_stages", type=int, default=2, help="Stages, one per device.")
        parser.add_argument(
            "--num_microbatches",
            type=int | None,
            help="Number of equal parts of a batch; by default twice the stages.",
        )
        parser.add_argument("--device", type=Literal["cpu"], default="cpu", help="Cost model.")
        parser.add_argument("--ckpt_path", type=str | None, help="As in `fit`, but ignored.")

    @override
    def _check_options(self) -> None:
        check_count("num_stages", self.config.num_stages)
        if self.config.num_microbatches is not None:
            check_count("num_microbatches", self.config.num_microbatches)

    @override
    def _profiled_job(self) -> ProfiledJob:
        return ProfiledJob()

    def explain(self) -> None:
        """Print the costs of the stages of the training step."""
        self.trainer.strategy.connect(self.model)
        batch, *indices = step_arguments(self.model, "training_step", self._first_batch(), 0)
        plan = explain_step(
            self.model,
            batch,
            self.config.num_stages,
            *indices,
            num_microbatches=self.config.num_microbatches,
            context=self.trainer.precision_plugin.forward_context,
        )
        print(plan)


class _FitRecord(pl.Callback):
    """A record for the report: the last validation, and whether Ctrl-C ended the fit."""

    validation_loss: float | None = None
    validation_step: int | None = None
    was_interrupted = False

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if "val_loss" in trainer.callback_metrics and not trainer.sanity_checking:
            self.validation_loss = float(trainer.callback_metrics["val_loss"])
            self.validation_step = trainer.global_step

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.was_interrupted = isinstance(exception, KeyboardInterrupt)


def tensorboard_command(trainer: pl.Trainer) -> str | None:
    """Return the command that shows the trainer's run beside others of its logger.

    `None` if the trainer logs nothing to TensorBoard.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    return writer.tensorboard_command(loggers[0]) if loggers else None
