"""Run the command line: `lightning-unitscale fit --config run.yaml`, a CLI with a report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from lightning_unitscale.arguments import check_choice, check_count, check_file
from lightning_unitscale.callbacks import ScaleMonitor
from lightning_unitscale.callbacks.lightning_steps import step_arguments
from lightning_unitscale.callbacks.packages import misconfigured
from lightning_unitscale.cli.errors import OneLineParser, argument_error
from lightning_unitscale.cli.profiled import ProfiledJob, profiled_job
from lightning_unitscale.memory.gpus import DEVICE_WORDS, device_type, name_with_type
from lightning_unitscale.memory.profile_report import check_sort_by
from lightning_unitscale.patching import nothing
from lightning_unitscale.pipeline.explain import explain_step
from lightning_unitscale.profiler import profile_graph
from lightning_unitscale.tensorboard import writer

# Values of `--ckpt_path` that are not paths.
_CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")
# Configurations of `fit` may have it.
IGNORED = "Accepted as by `fit`, but not used."
EXIT_INTERRUPTED = 130  # the exit status after Ctrl-C


class UnitScaleCLI(LightningCLI):
    """A LightningCLI for any model and data module that ends `fit` with a report.

    With a `ScaleMonitor` among the callbacks, the report shows the scale of every tensor. It also
    shows the validation loss (`val_loss`) and the command for TensorBoard.
    """

    # The name of a command with its own configuration.
    command = ""

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        self._record = _FitRecord()
        super().__init__(
            run=run,
            trainer_defaults={"callbacks": self._record},
            seed_everything_default=1,
            parser_kwargs={
                "prog": f"lightning-unitscale {self.command}".strip(),
                "description": (type(self).__doc__ or "").partition("\n")[0],
            },
            parser_class=OneLineParser,
            # Loggers make a new folder for each run. A user who repeats a folder name or resumes
            # wants to overwrite.
            save_config_kwargs={"overwrite": True},
            args=args,
        )

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config.get(self.config.get("subcommand"), self.config)
        path = config.get("ckpt_path") or "last"
        if "://" in path or path.partition(":")[0] in _CHECKPOINT_WORDS or Path(path).is_dir():
            return
        try:
            with open(path, "rb") as file:
                is_checkpoint = file.read(1) in (b"P", b"\x80")  # a zip file, or an old pickle
        except OSError:
            is_checkpoint = False
        if not is_checkpoint:
            raise ValueError(
                f"ckpt_path={path!r}: not a checkpoint. Expected a file that Lightning wrote. "
                "Correct the path."
            )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        # Lightning warns if `args` are given to a process with command-line arguments.
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
            if (complaint := argument_error(error)) is not None:
                raise type(error)(complaint) from None
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
            raise SystemExit(EXIT_INTERRUPTED) from None

    def after_fit(self) -> None:
        """Report on the run. If its last weights were not validated, validate them first."""
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
    numbers of devices and nodes count. You do not need the devices. Nothing is trained, logged or
    saved.
    """

    command = "profile"

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--device",
            type=Literal[DEVICE_WORDS] | None,
            help="Device whose kernels are simulated; by default the trainer's accelerator. "
            "You do not need the device.",
        )
        parser.add_argument("--sort_by", default="saved_bytes", help="Column to sort nodes by.")
        parser.add_argument("--limit", type=int, default=20, help="Number of nodes to show.")
        parser.add_argument("--json", type=str | None, help="JSON file to write the profile to.")
        parser.add_argument("--plot", type=str | None, help="File to draw the live bytes to.")
        parser.add_argument(
            "--budget_bytes",
            type=int | None,
            help="Bytes; also find the largest batch within them.",
        )
        parser.add_argument("--ckpt_path", type=str | None, help=IGNORED)

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.config.trainer
        use_base_precision(trainer)
        gpus = ("gpu", "cuda") if not torch.cuda.is_available() else ("gpu", "cuda", "auto")
        if isinstance(trainer.accelerator, str):
            known = ("gpu", "auto", *AcceleratorRegistry)
            check_choice("accelerator", trainer.accelerator, known, "unknown", "pass 'auto'")
        default = "cuda" if trainer.accelerator in gpus else "cpu"
        self._device = name_with_type(self.config.device or default)
        self._check_options()
        self._job = job = self._profiled_job()
        # The simulated devices need not exist here, and no run happens.
        trainer.accelerator, trainer.strategy = "cpu", job.strategy
        trainer.devices, trainer.num_nodes = job.num_devices, job.num_nodes
        self._keep_no_run()

    def _keep_no_run(self) -> None:
        """Leave out the settings that only a run needs."""
        trainer = self.config.trainer
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

    def answer(self) -> None:
        """Profile the first training batch, and print its costs."""
        model, context = self.model, self.trainer.precision_plugin.forward_context
        with self._job.ranks(self.trainer, model, device_type(self._device)):
            batch = self._first_batch()
            self._drop_logs()
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

    def _drop_logs(self) -> None:
        """Drop the values that the step logs, since no loop of the trainer runs."""
        for name in ("log", "log_dict"):
            self.model.__dict__[name] = nothing

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
        for batch in loader:
            return self.trainer.precision_plugin.convert_input(batch)
        raise misconfigured(
            f"`{self.command}`: the training data has no batch. Expected at least one. Check the "
            "size of the data, and `drop_last`."
        )

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


def use_base_precision(trainer: Any) -> None:
    """Replace a `UnitScaledPrecision` in a configuration by its base."""
    # Without a run there are no scaled matmuls.
    given = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]
    for plugin in given:
        if str(getattr(plugin, "class_path", "")).endswith(".UnitScaledPrecision"):
            base = plugin.init_args.get("base", "32-true")
            is_word, others = isinstance(base, (str, int)), [e for e in given if e is not plugin]
            trainer.plugins = others if is_word else [*others, base]
            if is_word:
                trainer.precision = base


class ExplainPipelineCLI(ProfileCLI):
    """Estimate the costs of stages: `explain-pipeline --config run.yaml --num_stages 4`."""

    command = "explain-pipeline"

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--num_stages", type=int, default=2, help="Number of stages, one per device."
        )
        parser.add_argument(
            "--num_microbatches",
            type=int | None,
            help="Number of equal parts of a batch; by default twice the stages.",
        )
        parser.add_argument(
            "--device", type=Literal["cpu"], default="cpu", help="Device of the cost model."
        )
        parser.add_argument("--ckpt_path", type=str | None, help=IGNORED)

    @override
    def _check_options(self) -> None:
        check_count("num_stages", self.config.num_stages)
        if self.config.num_microbatches is not None:
            check_count("num_microbatches", self.config.num_microbatches)

    @override
    def _profiled_job(self) -> ProfiledJob:
        return ProfiledJob()

    @override
    def answer(self) -> None:
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
    """Return the command that shows the trainer's run and the other runs of its logger.

    `None` if the trainer logs nothing to TensorBoard.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    return writer.command_for_logger(loggers[0]) if loggers else None
