"""A report of runs for those who do not run TensorBoard: a picture, a page, and a table."""

from lightning_unitscale.tensorboard.report.command import Report, write_report

__all__ = ["Report", "write_report"]
