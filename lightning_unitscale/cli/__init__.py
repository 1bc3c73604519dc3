"""The command line: its commands, and the devices of a profiled strategy."""

from lightning_unitscale.cli.commands import UnitScaleCLI, main, tensorboard_command

__all__ = ["UnitScaleCLI", "main", "tensorboard_command"]
