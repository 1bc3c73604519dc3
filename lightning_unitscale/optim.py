"""An optimizer with Muon for hidden matrices, and the parameter groups of a module for it."""

from lightning_unitscale.rules.muon import MuonAdamW
from lightning_unitscale.rules.transform import muon_param_groups

__all__ = ["MuonAdamW", "muon_param_groups"]
