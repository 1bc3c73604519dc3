"""Hourly time series for forecasting."""

from __future__ import annotations

from typing import Any

import numpy as np


def hourly_frame(series: int = 8, length: int = 120) -> Any:
    """Sums of sines with noise: a long table with one row for each series and hour."""
    import pandas as pd

    time = np.arange(length)
    dice = np.random.default_rng(0)
    frames = [
        pd.DataFrame(
            {
                "unique_id": str(index),
                "ds": pd.date_range("2024-01-01", periods=length, freq="h"),
                "time": time,
                "y": np.sin(time / (3 + index)) + 0.1 * dice.standard_normal(length) + index,
            }
        )
        for index in range(series)
    ]
    return pd.concat(frames, ignore_index=True)


def hourly_dataset(history: int, horizon: int) -> Any:
    """They as pytorch-forecasting takes them: ``history`` hours to forecast ``horizon`` from."""
    import pytorch_forecasting as pf

    return pf.TimeSeriesDataSet(
        hourly_frame(),
        time_idx="time",
        target="y",
        group_ids=["unique_id"],
        max_encoder_length=history,
        max_prediction_length=horizon,
        static_categoricals=["unique_id"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["y"],
    )
