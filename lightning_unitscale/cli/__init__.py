"""The command line: its commands, and the devices of a profiled strategy."""

from lightning_unitscale.cli.commands import UnitScaleCLI, tensorboard_command
from lightning_unitscale.cli.entry_point import main

__all__ = ["UnitScaleCLI", "main", "tensorboard_command"]
