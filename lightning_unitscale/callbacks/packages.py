"""Lightning's classes, of whichever of its packages they come from.

``pytorch_lightning`` has the same classes as ``lightning.pytorch`` under another name; a user has
one of them, or both.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import model_helpers

# The roots of the names of their modules.
PACKAGES = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})


def is_lightning(instance: object, *names: str) -> bool:
    """Whether an object is of one of Lightning's classes with these names."""
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0] in PACKAGES
        for kind in type(instance).__mro__
    )


def is_overridden(name: str, module: pl.LightningModule) -> bool:
    """Whether a user's module has a method of its own in place of Lightning's."""
    kinds = (kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    base = next(kind for kind in kinds if kind.__module__.partition(".")[0] in PACKAGES)
    return model_helpers.is_overridden(name, module, base)


def trainer_packages() -> list[Any]:
    """``lightning.pytorch``, and ``pytorch_lightning`` if the user has imported it."""
    other = sys.modules.get("pytorch_lightning")
    return [pl] if other is None else [pl, other]


if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback
else:

    class Callback(*(package.Callback for package in trainer_packages())):
        """A callback for the Trainer, and for the command line, of either package."""
