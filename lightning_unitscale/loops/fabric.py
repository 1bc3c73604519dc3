"""Callbacks around a module that Lightning Fabric has set up.

Private names of Fabric used here were checked on version 2.6: ``_forward_module`` of its wrapper.
"""

from __future__ import annotations

from typing import Any

from lightning_unitscale.loops.attach import Attachment
from lightning_unitscale.loops.hooks import attachment_of, unwrapped
from lightning_unitscale.loops.loop import LoopCallback
from lightning_unitscale.patching import Replacement, shadowed


def attach_in_fabric(callback: LoopCallback, fabric: Any, module: Any) -> Attachment:
    """Let a callback of Fabric's work on a module that has just been set up."""
    # What runs, under the wrapper that sets autocast.
    inner = unwrapped(module._forward_module)
    attachment = attachment_of(inner)
    if not isinstance(attachment, Attachment):
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        attachment = Attachment(inner, None, (), loggers=fabric.loggers, scaler=scaler)
        marking = _following(attachment, module.mark_forward_method)
        attachment.keep(shadowed(module, mark_forward_method=marking))
    attachment.add(callback)
    return attachment


def _following(attachment: Attachment, mark: Any) -> Replacement:
    """Have a method that is marked as a forward method followed."""

    def run(method: Any) -> None:
        name = getattr(method, "__name__", method)
        # A step of a LightningModule is marked already, and followed.
        if name == "forward" or name not in attachment.steps:
            mark(method)
            attachment.follow(name)

    return Replacement(mark, run)
