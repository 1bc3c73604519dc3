"""Measure the cost of low precision: which matmuls lose accuracy, and the summary of a run."""

from lightning_unitscale.precision.meter import precision_report
from lightning_unitscale.precision.report import LedgerRow, PrecisionReport, Together

__all__ = ["LedgerRow", "PrecisionReport", "Together", "precision_report"]
