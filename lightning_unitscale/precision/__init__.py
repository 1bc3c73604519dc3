"""Measure the cost of low precision: which matmuls lose accuracy, and where two runs diverge."""

from lightning_unitscale.precision.meter import precision_report
from lightning_unitscale.precision.report import LedgerRow, PrecisionReport, Together

__all__ = ["LedgerRow", "PrecisionReport", "Together", "precision_report"]
