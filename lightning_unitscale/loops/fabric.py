"""Callbacks in Lightning Fabric: ``Fabric(callbacks=[...])``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_unitscale.loops.arguments import unwrapped
from lightning_unitscale.loops.attach import Attachment, attachment_of
from lightning_unitscale.loops.loop import LoopCallback


class FabricAttachment(Attachment):
    """A module that Fabric has set up, with the callbacks that Fabric was given.

    Args:
        fabric: The Fabric.
        module: The module, without Fabric's wrapping.
    """

    def __init__(self, fabric: Any, module: nn.Module) -> None:
        self._fabric = fabric
        super().__init__(module, None, (), log_dir=None, scaler=None)

    @property
    @override
    def scaler(self) -> Any:
        return getattr(self._fabric.strategy.precision, "scaler", None)

    @property
    @override
    def num_parts(self) -> int:
        return int(self._fabric.world_size)

    @property
    @override
    def is_global_zero(self) -> bool:
        return bool(self._fabric.is_global_zero)

    @property
    @override
    def loggers(self) -> Sequence[Any]:
        return self._fabric.loggers


def attach_in_fabric(callback: LoopCallback, fabric: Any, module: Any) -> Attachment:
    """Let a callback of Fabric's work on a module that has just been set up.

    Args:
        callback: The callback.
        fabric: The Fabric.
        module: Fabric's wrapper of the module.

    Returns:
        The module's attachment, which its other callbacks share.
    """
    # Checked with Fabric 2.6: what runs, under the wrapper that sets autocast.
    inner = unwrapped(module._forward_module)
    attachment = attachment_of(inner) or FabricAttachment(fabric, inner)
    attachment.add(callback)
    return attachment
