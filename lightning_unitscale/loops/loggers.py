"""Which writer a logger gets, by the name of its class: no logger's package is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, TypeAlias

from lightning_unitscale.loops.log_writers import (
    Log,
    MlflowWriter,
    NumberWriter,
    TextWriter,
    WandbWriter,
    Writer,
)
from lightning_unitscale.tensorboard.writer import ScaleWriter, TensorBoardTabs

_Maker: TypeAlias = Callable[[Any, TensorBoardTabs], Writer]


def writer_for(logger: Any, tabs: TensorBoardTabs) -> Writer:
    """The writer to a logger, whose run begins with it.

    Args:
        logger: A logger of Lightning or Fabric, or another one that has ``log_metrics``; a
            ``SummaryWriter``; a run of W&B, Trackio or MLflow; a writer.
        tabs: As for ``ScaleWriter``.

    Raises:
        TypeError: If it is none of these.
    """
    return _maker(logger)(logger, tabs)


def checked_loggers(loggers: Any) -> tuple[Any, ...]:
    """One logger or several, as a tuple.

    Raises:
        TypeError: If one of them is none.
    """
    given = tuple(loggers) if isinstance(loggers, (list, tuple)) else (loggers,)
    for logger in given:
        _maker(logger)
    return given


def mlflow_run(run: Any) -> MlflowWriter:
    """Writes to a run of MLflow, with the tracking server that is set."""
    mlflow, run_id = import_module("mlflow"), run.info.run_id

    def log(values: Mapping[str, Any], step: int) -> None:
        mlflow.log_metrics(dict(values), step=step, run_id=run_id)

    return MlflowWriter(log, mlflow.MlflowClient(), run_id)


def _wandb_run(run: Any) -> WandbWriter:
    run.define_metric("scales/*", step_metric="scales/step")

    def log(values: Mapping[str, Any], step: int) -> None:
        # Into the row that the user's next call completes: one of its own would move his axis.
        run.log({**values, "scales/step": step}, commit=False)

    return WandbWriter(log)


def _trackio_run(run: Any) -> WandbWriter:
    return WandbWriter(lambda values, step: run.log(dict(values), step=step), "trackio")


def _metrics(logger: Any) -> Log:
    return lambda values, step: logger.log_metrics(dict(values), step=step)


# By the name of the class, of whichever of Lightning's packages; of others with the package.
_MAKERS: Final[Mapping[str, _Maker]] = {
    "TensorBoardLogger": lambda logger, tabs: ScaleWriter(logger.experiment, tabs=tabs),
    "CSVLogger": lambda logger, _: TextWriter(_metrics(logger)),
    "WandbLogger": lambda logger, _: WandbWriter(_metrics(logger)),
    "MLFlowLogger": lambda logger, _: MlflowWriter(
        _metrics(logger), logger.experiment, logger.run_id
    ),
    "SummaryWriter": lambda writer, tabs: ScaleWriter(writer, tabs=tabs),
    "wandb.Run": lambda run, _: _wandb_run(run),
    "trackio.Run": lambda run, _: _trackio_run(run),
    "mlflow.ActiveRun": lambda run, _: mlflow_run(run),
}


def _maker(logger: Any) -> _Maker:
    if isinstance(logger, NumberWriter):
        return lambda writer, _: writer
    for kind in type(logger).__mro__:
        package = kind.__module__.partition(".")[0]
        maker = _MAKERS.get(kind.__name__) or _MAKERS.get(f"{package}.{kind.__name__}")
        if maker is not None:
            return maker
    if hasattr(logger, "log_metrics"):
        return lambda logger, _: NumberWriter(_metrics(logger))
    raise TypeError(
        f"loggers={logger!r}: no logger that is known; expected one of Lightning's, a "
        "SummaryWriter, a run of W&B, Trackio or MLflow, or what has log_metrics(values, step=); "
        "pass one of those."
    )
