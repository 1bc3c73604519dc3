"""The oracle of every rule is a Monte-Carlo run of the operation itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rule_cases import CASES, Case, made
from torch import Tensor

from lightning_unitscale.functional import registered_rules
from lightning_unitscale.functional.rule import ScaleRule, _BY_FUNCTION


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def rule_named(name: str) -> ScaleRule:
    return next(one for one in registered_rules() if one.name == name)
