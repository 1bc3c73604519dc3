"""Scales straight from event files, without a TensorBoard that runs, and without thinning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.util import tensor_util

from lightning_unitscale.tensorboard.history import RunScales
from lightning_unitscale.tensorboard.schema import ALERTS_TAG, Series

EVENT_FILES = "*tfevents*"


def read_run(directory: str | Path) -> RunScales:
    """The scales in the event files of a folder, all of them read.

    Raises:
        FileNotFoundError: If there is no such folder, or no event file in it.
        ValueError: If its event files have no scales.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"directory={str(folder)!r}: no such folder; expected the folder of a run, such as "
            "logs/gpt/version_0; correct the path"
        )
    # Their names begin with the time at which they were opened.
    files = sorted(path for path in folder.glob(EVENT_FILES) if path.is_file())
    if not files:
        raise FileNotFoundError(f"directory={str(folder)!r}: no event files here; {_hint(folder)}")
    contents: dict[str, bytes] = {}
    points: dict[str, list[tuple[int, npt.NDArray[Any]]]] = {}
    for path in files:
        # The legacy loader leaves summaries as they were written: scalars need no conversion here.
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                is_ours = value.tag == ALERTS_TAG or Series.parse(value.tag) is not None
                if not value.HasField("tensor") or not is_ours:
                    continue
                if value.metadata.plugin_data.content:
                    contents.setdefault(value.tag, value.metadata.plugin_data.content)
                array = np.asarray(tensor_util.make_ndarray(value.tensor))
                points.setdefault(value.tag, []).append((event.step, array))
    run = RunScales({tag: contents.get(tag, b"") for tag in points}, points.__getitem__)
    if not run.directions:
        raise ValueError(
            f"directory={str(folder)!r}: its event files have no scales; expected a run whose "
            "Trainer had a ScaleMonitor among its callbacks; add one and train again"
        )
    return run


def _hint(folder: Path) -> str:
    """Where event files are instead."""
    below = sorted({path.parent for path in folder.rglob(EVENT_FILES) if path.is_file()})
    if not below:
        return "expected the folder that a TensorBoardLogger wrote (its log_dir); correct the path"
    shown = ", ".join(str(path) for path in below[:5]) + (", ..." if len(below) > 5 else "")
    return f"expected the folder of one run; there are event files in {shown}"
