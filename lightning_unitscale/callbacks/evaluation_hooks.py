"""Validation, test and prediction as one thing: what is done around a batch of any of them."""

from __future__ import annotations

import abc
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override


class EvaluationHooks(pl.Callback, abc.ABC):
    """Hands the hooks around the batches of all evaluations on to two methods."""

    @abc.abstractmethod
    def _before_evaluation(self, trainer: pl.Trainer, name: str, batch: Any, *indices: int) -> None:
        """Called before a batch of the step of this name, with its index and the loader's."""

    @abc.abstractmethod
    def _after_evaluation(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Called after a batch."""

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._before_evaluation(trainer, "validation_step", batch, batch_idx, dataloader_idx)

    @override
    def on_test_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._before_evaluation(trainer, "test_step", batch, batch_idx, dataloader_idx)

    @override
    def on_predict_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._before_evaluation(trainer, "predict_step", batch, batch_idx, dataloader_idx)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._after_evaluation(trainer, batch_idx)

    @override
    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._after_evaluation(trainer, batch_idx)

    @override
    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._after_evaluation(trainer, batch_idx)
