"""Callbacks around a module that Lightning Fabric has set up.

Private names of Fabric used here were checked on version 2.6: ``_forward_module`` of its wrapper.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_unitscale.loops.attach import Attachment
from lightning_unitscale.loops.hooks import attachment_of, unwrapped
from lightning_unitscale.loops.loop import LoopCallback
from lightning_unitscale.patching import StandIn, shadowed


def attach_in_fabric(callback: LoopCallback, fabric: Any, module: Any) -> Attachment:
    """Let a callback of Fabric's work on a module that has just been set up."""
    # What runs, under the wrapper that sets autocast.
    inner = unwrapped(module._forward_module)
    attachment = attachment_of(inner)
    if not isinstance(attachment, Attachment):
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        attachment = Attachment(inner, None, (), loggers=fabric.loggers, scaler=scaler)
        marking = _Marking(attachment, module.mark_forward_method)
        attachment.keep(shadowed(module, mark_forward_method=marking))
    attachment.add(callback)
    return attachment


class _Marking(StandIn):
    """Stands in for a wrapper's ``mark_forward_method``: a method that is marked is followed."""

    def __init__(self, attachment: Attachment, method: Any) -> None:
        super().__init__(method)
        self._attachment = attachment

    @override
    def call(self, method: Any) -> None:
        name = getattr(method, "__name__", method)
        # What has been marked before, as steps of a LightningModule are, is no plain method now.
        if name == "forward" or name not in self._attachment.steps:
            self._method(method)
            self._attachment.follow(name)
