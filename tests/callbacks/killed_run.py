"""A training that ends by SIGKILL at step 23: ``python -m ... FOLDER ARRANGEMENT``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from tests.callbacks.runs import ARRANGEMENTS
from tests.callbacks.test_resume import train
from tests.distributed.launch import quiet_rank


class Killed(pl.Callback):
    """Ends the process, with nothing closed or written."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 23:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    quiet_rank()
    folder, how = sys.argv[1:]
    train([*ARRANGEMENTS[how](), Killed()], 40, Path(folder) / how)
