"""Optimizers for models that are unit-scaled by rules."""

from lightning_unitscale.rules.muon import MuonAdamW

__all__ = ["MuonAdamW"]
