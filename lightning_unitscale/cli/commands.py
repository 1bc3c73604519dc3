"""Train by `lightning-unitscale fit --config run.yaml` with a report, and show short errors."""

import re
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn
from zipfile import is_zipfile

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from lightning_unitscale.callbacks import ScaleMonitor
from lightning_unitscale.capture.fallback import Refusal
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.tensorboard import writer

# Values of `--ckpt_path` that are not paths.
_CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")
EXIT_INTERRUPTED = 130  # the exit status after Ctrl-C
EXIT_ERROR = 2
_PACKAGE = Path(__file__).resolve().parent.parent
# Lines of jsonargparse's messages that repeat the type or the value.
_REPEATED = re.compile(r"(Does not validate|Subtypes: |Errors:|Given value|Expected a (path|dot) )")
# Complaints about other types that an argument may have, after that about the given class.
_OF_OTHER_TYPES = re.compile(
    r"(?<=\bclass_path )('.*?) (?:Import path \S+ does not correspond to|"
    r"Problem with given class_path 'lightning\.Callback').*"
)
_GIVEN = re.compile(r"^ *Given value: (?!NestedArg)(.*)", re.MULTILINE)
# The form of argument errors: "argument=value: what is wrong. Expected ...".
_ARGUMENT_ERROR = re.compile(r"^[\s-]*(\w+=.*: .*[Ee]xpected .*)", re.MULTILINE)


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
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            # Lightning warns if `args` are given to a process with command-line arguments.
            if args is None or isinstance(args, list):
                self.config = parser.parse_args(args)
            else:
                self.config = parser.parse_object(args)
        except UnicodeDecodeError as error:  # some shells redirect to files in UTF-16
            parser.error(f"config: not UTF-8 text ({error}). Save the file as UTF-8")
        if "subcommand" in self.config:
            # Lightning reads hyperparameters from the file next.
            _check_checkpoint(self.config[self.config.subcommand].get("ckpt_path"))

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


class CommandError(SystemExit):
    """The end of a command with one line on stderr and exit status 2."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        print(line, file=sys.stderr)
        self.code = EXIT_ERROR


class OneLineParser(LightningArgumentParser):
    """A parser of a configuration whose errors are one line each."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # jsonargparse's own, for one type of several that it tries
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        raise CommandError(f"{program}: {in_one_line(message)}. See {program} --help.")


def in_one_line(message: str) -> str:
    """Return a message of jsonargparse without its repetitions."""
    if message.startswith("Unexpected config:"):
        return "config: the file has no options. Expected keys such as `model` and `trainer`"
    lines = [line.strip(" -") for line in message.splitlines()]
    kept = dict.fromkeys(
        re.sub(r'^Parser key "(.*?)":', r"\1:", line)
        .replace("Expected a <class 'NoneType'>", "")
        .replace("a typing.Literal", "one of ")
        for line in lines
        if not _REPEATED.match(line)
    )
    text = re.sub(r"a <class '(?:.*\.)?(\w+)'>", r"\1", " ".join(filter(None, kept)))
    text = _OF_OTHER_TYPES.sub(r"\1", text)
    begin, *choices = text.split("Expected ")
    text = f"{begin}Expected {' or '.join(map(str.strip, choices))}" if choices else text
    given = None if "Got value" in text else _GIVEN.search(message)
    return text if given is None else f"{text}. Got {given[1]}"


def _check_checkpoint(path: str | None) -> None:
    """Refuse a path that is neither a complete checkpoint file nor a folder."""
    path = path or "last"
    if "://" in path or path.partition(":")[0] in _CHECKPOINT_WORDS or Path(path).is_dir():
        return
    try:
        with open(path, "rb") as file:
            is_checkpoint = file.read(1) == b"\x80" or is_zipfile(file)  # an old one is a pickle
    except OSError:
        is_checkpoint = False
    if not is_checkpoint:
        raise ValueError(
            f"ckpt_path={path!r}: not a checkpoint. Expected a complete file that Lightning wrote. "
            "Correct the path."
        )


def argument_error(error: Exception) -> str | None:
    """Return the line of an error's text about an argument, or ``None``."""
    complaint = _ARGUMENT_ERROR.search(str(error))
    return None if complaint is None else complaint[1]


def _place(error: BaseException) -> Path:
    """Return the file that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).resolve() if frames else Path()


def is_own(error: BaseException) -> bool:
    """Check whether the package raised an error, not the user's code or a library."""
    return _place(error).is_relative_to(_PACKAGE)


def is_answer(error: Exception, *, plans: bool) -> bool:
    """Check whether an error answers the user: the request is wrong or impossible."""
    if isinstance(error, (CaptureError, Refusal, MisconfigurationException)):
        return True
    if _place(error).name == "accelerator_connector.py":  # Lightning's checks of the Trainer
        return True
    if not is_own(error):
        return False
    if isinstance(error, (ValueError, TypeError)):
        return argument_error(error) is not None
    return plans and isinstance(error, RuntimeError)
