"""Searches for a learning rate, during which a Trainer has no callbacks but the search's own."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateFinder


def searches_rate(trainer: pl.Trainer) -> bool:
    """Whether a learning rate is looked for at the start of the fit, by whatever entry point."""
    return any(isinstance(one, LearningRateFinder) for one in trainer.callbacks)  # type: ignore[attr-defined]


def refuse_rate_search(trainer: pl.Trainer) -> None:
    """Refuse to look for a rate where only the callbacks make the model that is to be trained.

    Weights, factors and rates are set when the first batch starts. A search runs that batch without
    the callbacks, so it would find a rate of the plain model, and give it to another one.

    Raises:
        MisconfigurationException: If a learning rate is looked for.
    """
    if searches_rate(trainer):
        raise MisconfigurationException(
            "LearningRateFinder: it takes the callbacks out of the Trainer while it searches, so "
            "it would find the rate of the plain model and not of the one that is scaled by rules; "
            "expected no search with method='unit-scaling' or 'u-mup'; leave it out (u-muP's best "
            "rates are near 1), or pass method='lossless', whose rates are the plain model's."
        )
