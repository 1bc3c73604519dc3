"""The command line: its commands, and what a configuration's strategy means for a profile."""

from lightning_unitscale.cli.commands import UnitScaleCLI, main, tensorboard_command

__all__ = ["UnitScaleCLI", "main", "tensorboard_command"]
