"""Trainers of the ranks that tests start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl


def quiet_trainer(folder: Path, **options: Any) -> pl.Trainer:
    """Return a Trainer on CPUs that writes only the files that the options request."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**quiet, **options})
