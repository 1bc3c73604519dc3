"""A project: the packages it needs, and functions that create its module and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from measure import versions_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Made = tuple[pl.LightningModule, Iterable[Any]]


@dataclass(frozen=True)
class Project:
    """One module to train.

    Args:
        name: What the script's command line takes.
        requires: Distributions on PyPI that ``make`` imports.
        make: Makes the module, with random weights, and an iterable of batches.
        trainer: Arguments of the ``Trainer`` that the package's own training would give.
    """

    name: str
    requires: tuple[str, ...]
    make: Callable[[], Made]
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """The distributions that are not installed."""
        return [name for name, version in self.versions().items() if version is None]

    def versions(self) -> dict[str, str | None]:
        """The version of each, ``None`` for those that are not installed."""
        return versions_of(self.requires)


class Batches(Dataset[Any]):
    """Batches that were made beforehand, so that no run draws random numbers for its data."""

    def __init__(self, make: Callable[[], Any], count: int = 4) -> None:
        self.batches = [make() for _ in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def loader(make: Callable[[], Any], count: int = 4) -> DataLoader[Any]:
    """A loader of ``count`` ready batches, in the same order in every epoch."""
    return DataLoader(Batches(make, count), batch_size=None)


class Loss(pl.LightningModule):
    """Trains a plain module of a package, as it is, with the loss that its users write.

    Args:
        model: The package's module.
        loss: Called with the module and the batch.
        rate: AdamW's learning rate.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Any], Tensor], rate: float = 1e-3
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.rate = rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)
