"""Find the Lightning packages that the user has imported, without importing any.

``pytorch_lightning`` has the same classes as ``lightning.pytorch`` under another name. A user has
one of them, both, or, in other loops, none.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from lightning_unitscale.loops.ranks import rank
from lightning_unitscale.patching import base_when_imported

# Packages with a Trainer. One is a copy of the other.
TRAINER_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# The root names of Lightning's modules.
PACKAGES = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
_LOG = logging.getLogger("lightning_unitscale")

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback as Callback
else:
    # A callback for the Trainer, and for the command line, of each package.
    Callback = base_when_imported("Callback", *TRAINER_PACKAGES)


def trainer_packages() -> list[Any]:
    """Return ``lightning.pytorch`` and ``pytorch_lightning``, if the user has imported them."""
    return [sys.modules[name] for name in TRAINER_PACKAGES if name in sys.modules]


def is_lightning(instance: object, *names: str) -> bool:
    """Check whether an object has one of Lightning's classes with these names."""
    return any(kind.__name__ in names and _is_own(kind) for kind in type(instance).__mro__)


def is_overridden(name: str, module: pl.LightningModule) -> bool:
    """Check whether a user's module overrides one of Lightning's methods."""
    kinds = (kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    base = next(filter(_is_own, kinds))
    helpers = _own_module("utilities.model_helpers")
    return bool(helpers.is_overridden(name, module, base))


def is_param_in_hook_signature(hook: Callable[..., Any], name: str, **options: Any) -> bool:
    """Check whether Lightning passes an argument of this name to a hook."""
    signatures = _own_module("utilities.signature_utils")
    return bool(signatures.is_param_in_hook_signature(hook, name, **options))


def misconfigured(text: str) -> Exception:
    """Return Lightning's ``MisconfigurationException``, for a Trainer that lacks support."""
    roots = [root for root in ("lightning.fabric", "lightning_fabric") if root in sys.modules]
    exceptions = import_module(f"{[*roots, 'lightning.fabric'][0]}.utilities.exceptions")
    return cast("Exception", exceptions.MisconfigurationException(text))


def rank_zero_warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn on the first rank."""
    if trainer_packages():
        _own_module("utilities.rank_zero").rank_zero_warn(text, category=category)
    elif rank() == 0:
        warnings.warn(text, category, stacklevel=5)


def rank_zero_info(text: str) -> None:
    """Log on the first rank, with Lightning's logger if there is one."""
    if trainer_packages():
        _own_module("utilities.rank_zero").rank_zero_info(text)
    elif rank() == 0:
        if not _LOG.hasHandlers():
            # Lightning also shows its logs if logging is not configured.
            _LOG.addHandler(logging.StreamHandler())
            _LOG.setLevel(logging.INFO)
        _LOG.info(text)


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in PACKAGES


def _own_module(name: str) -> Any:
    return import_module(f"{trainer_packages()[0].__name__}.{name}")
