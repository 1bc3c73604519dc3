"""A precision plugin for a Trainer and for Fabric that brings its own ``UnitScaleCallback``.

A plugin has no hooks around batches, checkpoints and errors. So it adds a callback to the list of
the Trainer or of Fabric before a run calls the first callback. The plugins of Lightning's four
packages have the same names and different methods. The package that runs the plugin is known when a
module arrives. The plugin's class is then derived from that package's plugin of the same precision.

Names of Lightning that are not documented, checked on 2.6: ``Strategy.connect``, ``Fabric.setup``
and ``Fabric._callbacks``.
"""

from __future__ import annotations

import functools
import sys
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_unitscale.arguments import shown
from lightning_unitscale.callbacks.explanation import Explanation
from lightning_unitscale.callbacks.lightning_steps import given_arguments
from lightning_unitscale.callbacks.options import FP8, Simulate
from lightning_unitscale.callbacks.packages import (
    TRAINER_PACKAGES,
    is_lightning,
    misconfigured,
    rank_zero_warn,
)
from lightning_unitscale.callbacks.unit_scale import UnitScaleCallback
from lightning_unitscale.patching import base_when_imported, when_imported

_ROOTS = (*TRAINER_PACKAGES, "lightning.fabric", "lightning_fabric")
# The methods that first pass a module to the code that runs it.
_ENTRIES = [
    *((root, "strategies.strategy", "Strategy", "connect") for root in TRAINER_PACKAGES),
    *((root, "fabric", "Fabric", "setup") for root in _ROOTS[2:]),
]
_PLUGINS = {
    "32-true": "Precision",
    "64-true": "DoublePrecision",
    "16-true": "HalfPrecision",
    "bf16-true": "HalfPrecision",
    "16-mixed": "MixedPrecision",
    "bf16-mixed": "MixedPrecision",
}
_SHORT = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as Precision
else:
    Precision = base_when_imported(
        "Precision", *(f"{root}.plugins.precision.precision" for root in _ROOTS)
    )


class UnitScaledPrecision(Precision):
    """A precision plugin that scales matmuls as :class:`UnitScaleCallback` does.

    Results, checkpoints and options are those of ``UnitScaleCallback(precision=..., simulate=...)``
    with ``Trainer(precision=base)``. You can resume a run of either kind from a checkpoint of the
    other.

    Args:
        precision: ``"fp8"`` or :class:`FP8` for linear layers in real FP8. ``None`` only scales
            matmuls, which changes no result.
        simulate: Format in which matmuls are simulated, as in :class:`UnitScaleCallback`.
        recalibrate: When units are measured again, as in :class:`UnitScaleCallback`.
        base: Precision of everything else, as in ``Trainer(precision=...)``: ``"32-true"``,
            ``"bf16-mixed"``, ``"16-mixed"`` (with its gradient scaler), ``"bf16-true"``,
            ``"16-true"`` or ``"64-true"``. Lightning accepts either a precision plugin or
            ``precision=``, not both. ``base`` may also be a plugin of Lightning, such as
            ``FSDPPrecision("bf16-mixed")``, which ``FSDPStrategy`` requires.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: When a run begins, if a :class:`UnitScaleCallback` is given too,
            or the device does not support FP8.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_unitscale import UnitScaledPrecision
        >>> trainer = Trainer(plugins=[UnitScaledPrecision("fp8", base="bf16-mixed")])
    """

    # The class that this one was derived from for a package, and its plugin of Lightning.
    _root: type | None = None
    _base_type: Any = Precision

    def __init__(
        self,
        precision: Literal["fp8"] | FP8 | None = None,
        *,
        simulate: str | tuple[str, str] | Simulate | None = None,
        recalibrate: Literal["auto"] | int | None = "auto",
        base: str | int | Any = "32-true",
    ) -> None:
        given = given_arguments(UnitScaledPrecision.__init__, locals())
        words = (f"{name}={value!r}" for name, value in given.items())
        self._words = ", ".join(words).removeprefix("precision=")
        self.callback = UnitScaleCallback(
            precision=precision, simulate=simulate, recalibrate=recalibrate
        )
        self._base = _checked_base(base)
        if isinstance(self._base, str):
            self.precision: Any = self._base
            # The contexts in which a user makes a module are those of any package.
            root = next((root for root in _ROOTS if root in sys.modules), None)
            if root is not None:
                self._follow(root, "cuda" if torch.cuda.is_available() else "cpu")
        else:
            self._become(type(self._base), vars(self._base))
        _await_modules()

    def __repr__(self) -> str:
        """Return the call that makes this plugin."""
        return f"UnitScaledPrecision({self._words})"

    def explain(self) -> Explanation:
        """Explain which matmuls were scaled, as :meth:`UnitScaleCallback.explain`."""
        return self.callback.explain()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module to the base precision.

        Raises:
            MisconfigurationException: If the module has brought a callback of the same kind.
        """
        trainer = getattr(module, "_trainer", None)
        if trainer is not None:
            self._check(trainer.callbacks)
        converted: nn.Module = self._base_type.convert_module(self, module)
        return converted

    def __reduce__(self) -> Any:
        """Return how another process makes the plugin, since its class is created here."""
        return _restored, (self._root or type(self), self._base_type, vars(self).copy())

    def join(self, root: str, device: torch.device, callbacks: list[Any]) -> None:
        """Add the callback to a Trainer or to Fabric, of the package ``root``."""
        self._check(callbacks)
        if self._base == "16-mixed" and device.type == "cpu":
            rank_zero_warn(
                f"{self!r}: a CPU has no autocast to FP16. It runs as base='bf16-mixed', as in "
                "Trainer(precision='16-mixed')."
            )
        self._follow(root, device.type)
        if self.callback not in callbacks:
            # Lightning keeps its tuners at the front.
            is_tuner = [is_lightning(each, "BatchSizeFinder", "LearningRateFinder")
                        for each in callbacks]  # fmt: skip
            callbacks.insert(sum(is_tuner), self.callback)

    def _check(self, callbacks: list[Any]) -> None:
        for other in callbacks:
            if isinstance(other, UnitScaleCallback) and other is not self.callback:
                raise misconfigured(
                    f"plugins: {self!r} together with callbacks: {other!r}. Both scale the same "
                    "matmuls. Expected one of the two. Leave one out."
                )

    def _follow(self, root: str, device: str) -> None:
        """Take the methods of a package's plugin of the base precision."""
        if not isinstance(self._base, str):
            return
        # Lightning replaces FP16 on a CPU in the same way.
        precision = "bf16-mixed" if (self._base, device) == ("16-mixed", "cpu") else self._base
        kind = getattr(import_module(f"{root}.plugins.precision"), _PLUGINS[precision])
        if kind is self._base_type and getattr(self, "device", device) == device:
            return  # it keeps its gradient scaler
        arguments = {"MixedPrecision": (precision, device), "HalfPrecision": (precision,)}
        self._become(kind, vars(kind(*arguments.get(kind.__name__, ()))))

    def _become(self, kind: type, state: dict[str, Any]) -> None:
        self.__class__ = _made(self._root or type(self), kind)
        self._base_type = kind
        vars(self).update(state)


@functools.cache
def _await_modules() -> None:
    """Add each plugin's callback to its Trainer or Fabric as soon as that gets a module."""
    for root, name, kind, method in _ENTRIES:
        when_imported(f"{root}.{name}", partial(_watch, root, kind, method))


def _watch(root: str, name: str, method: str, module: ModuleType) -> None:
    """Call ``join`` before a method of a Trainer's strategy, or of Fabric, that has a plugin."""
    kind = getattr(module, name)
    below = getattr(kind, method)

    @functools.wraps(below)
    def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
        is_fabric = name == "Fabric"
        strategy = owner.strategy if is_fabric else owner
        plugin = strategy.precision if is_fabric else strategy.precision_plugin
        if isinstance(plugin, UnitScaledPrecision):
            model: Any = args[0] if args else kwargs.get("model")
            callbacks = owner._callbacks if is_fabric else model.trainer.callbacks
            plugin.join(root, strategy.root_device, callbacks)
        return below(owner, *args, **kwargs)

    setattr(kind, method, run)


@functools.cache
def _made(root: type, base: type) -> type:
    """Return the plugin as a subclass of a plugin of Lightning."""
    # The methods are copied, because `root` already derives from `Precision` of all packages. The
    # key of a plugin's state in a checkpoint is the qualified name of its class. It stays that of
    # the base, so that checkpoints with and without the plugin are the same.
    own = {name for kind in root.__mro__[: root.__mro__.index(Precision)] for name in vars(kind)}
    body = {
        name: value
        for kind in reversed(base.__mro__[:-1])
        for name, value in vars(kind).items()
        if not name.startswith("__") and name not in own
    }
    body |= {"_root": root, "__module__": root.__module__, "__qualname__": base.__qualname__}
    return type(root.__name__, (root, base), body)


def _restored(root: type, base: type | None, state: dict[str, Any]) -> UnitScaledPrecision:
    plugin: UnitScaledPrecision = object.__new__(root if base is None else _made(root, base))
    vars(plugin).update(state)
    _await_modules()
    return plugin


def _checked_base(base: Any) -> Any:
    """Return a precision in its long form, or a plugin."""
    if isinstance(base, (str, int)) and not isinstance(base, bool):
        base = _SHORT.get(str(base), base)
    is_plugin = is_lightning(base, "Precision") and not isinstance(base, UnitScaledPrecision)
    if not (is_plugin or (isinstance(base, str) and base in _PLUGINS)):
        raise ValueError(
            f"base={shown(base)}: not a precision for the rest of the step. Expected one of "
            f"{', '.join(map(repr, _PLUGINS))} or a precision plugin of Lightning. Pass "
            "base='bf16-mixed'."
        )
    return base
