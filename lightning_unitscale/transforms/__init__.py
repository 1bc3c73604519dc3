"""Transforms of plain modules, and the passes that the callbacks share with them."""

from lightning_unitscale.transforms.gauge import Gauge, GaugePair
from lightning_unitscale.transforms.lossless_unit_scale import lossless_unit_scale
from lightning_unitscale.transforms.simulate_format import simulate_format, simulate_fp8

__all__ = ["Gauge", "GaugePair", "lossless_unit_scale", "simulate_format", "simulate_fp8"]
