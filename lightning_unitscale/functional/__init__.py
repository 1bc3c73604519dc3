"""Unit-scaled operations and the primitives that place a scale in one direction only."""

from lightning_unitscale.functional.scale import scale, scale_bwd, scale_fwd

__all__ = ["scale", "scale_bwd", "scale_fwd"]
