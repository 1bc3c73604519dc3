"""Training loops other than a Lightning Trainer's."""

from lightning_unitscale.loops.attach import Attachment, attach

__all__ = ["Attachment", "attach"]
