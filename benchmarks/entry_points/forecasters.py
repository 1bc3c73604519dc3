"""Forecasting packages with their own Lightning Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from real.hourly import hourly_dataset, hourly_frame

from .entry_point import EntryPoint, Trained, given

_HISTORY, _HORIZON = 24, 6
_QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def _neuralforecast(name: str, callbacks: list[Any], folder: Path, **options: Any) -> Trained:
    import neuralforecast.models
    from neuralforecast import NeuralForecast

    model = getattr(neuralforecast.models, name)(
        h=_HORIZON,
        input_size=_HISTORY,
        max_steps=20,
        val_check_steps=10,
        windows_batch_size=32,
        batch_size=4,
        default_root_dir=str(folder),
        **_QUIET,
        **options,
        **given(callbacks),
    )
    forecaster = NeuralForecast([model], freq="h")
    forecaster.fit(hourly_frame().drop(columns="time"), val_size=_HORIZON)
    trained = forecaster.models[0]
    forecast = forecaster.predict().drop(columns=["unique_id", "ds"])
    numbers = [trained.train_trajectories, trained.valid_trajectories, forecast]
    # It trains a copy of the model, with copies of the callbacks.
    return Trained(trained, numbers, trained.trainer_kwargs.get("callbacks", ()))


def neuralforecast_nhits(callbacks: list[Any], folder: Path) -> Trained:
    return _neuralforecast("NHITS", callbacks, folder, mlp_units=3 * [[64, 64]])


def neuralforecast_patchtst(callbacks: list[Any], folder: Path) -> Trained:
    sizes = {"hidden_size": 32, "linear_hidden_size": 64, "n_heads": 4, "encoder_layers": 2}
    return _neuralforecast("PatchTST", callbacks, folder, patch_len=8, **sizes)


def darts_transformer(callbacks: list[Any], folder: Path) -> Trained:
    from darts import TimeSeries
    from darts.models import TransformerModel

    model = TransformerModel(
        input_chunk_length=_HISTORY,
        output_chunk_length=_HORIZON,
        d_model=32,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=64,
        n_epochs=2,
        random_state=1,
        work_dir=str(folder),
        log_tensorboard=True,
        save_checkpoints=True,
        pl_trainer_kwargs={**_QUIET, **given(callbacks)},
    )
    series = [
        TimeSeries.from_values(row)
        for row in hourly_frame()["y"].to_numpy(np.float32).reshape(8, -1)
    ]
    model.fit(
        [row[:-_HORIZON] for row in series],
        val_series=[row[-_HISTORY - _HORIZON :] for row in series],
    )
    metrics = dict(model.trainer.callback_metrics)
    module = model.model
    forecasts = [found.values() for found in model.predict(_HORIZON, series=series)]
    return Trained(module, [metrics, forecasts])


def pytorch_forecasting_tft(callbacks: list[Any], folder: Path) -> Trained:
    import lightning.pytorch as pl
    import pytorch_forecasting as pf

    training = hourly_dataset(_HISTORY, _HORIZON)
    validation = pf.TimeSeriesDataSet.from_dataset(training, hourly_frame(), predict=True)
    model = pf.TemporalFusionTransformer.from_dataset(
        training, hidden_size=16, attention_head_size=2, dropout=0.1, hidden_continuous_size=8,
        loss=pf.metrics.QuantileLoss(), log_interval=-1,
    )  # fmt: skip
    trainer = pl.Trainer(
        max_epochs=2,
        limit_train_batches=10,
        gradient_clip_val=0.1,
        default_root_dir=folder,
        **_QUIET,
        **given(callbacks),
    )
    trainer.fit(
        model,
        train_dataloaders=training.to_dataloader(train=True, batch_size=16, num_workers=0),
        val_dataloaders=(data := validation.to_dataloader(batch_size=16, num_workers=0)),
    )
    metrics = dict(trainer.callback_metrics)
    forecasts = model.predict(data, trainer_kwargs={"accelerator": "cpu", "logger": False})
    return Trained(model, [metrics, forecasts])


def gluonts_patchtst(callbacks: list[Any], folder: Path) -> Trained:
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch import PatchTSTEstimator

    data = PandasDataset.from_long_dataframe(
        hourly_frame().astype({"y": np.float32}),
        target="y", item_id="unique_id", timestamp="ds", freq="h",
    )  # fmt: skip
    estimator = PatchTSTEstimator(
        prediction_length=_HORIZON,
        context_length=_HISTORY,
        patch_len=8,
        d_model=32,
        nhead=4,
        dim_feedforward=64,
        num_encoder_layers=2,
        num_batches_per_epoch=10,
        trainer_kwargs={
            "max_epochs": 2, "default_root_dir": folder, **_QUIET, **given(callbacks),
        },
    )  # fmt: skip
    output = estimator.train_model(data)
    forecasts = [forecast.mean for forecast in output.predictor.predict(data)]
    return Trained(output.trained_net, [dict(output.trainer.callback_metrics), forecasts])


ENTRY_POINTS = (
    EntryPoint(
        "neuralforecast-nhits", "NeuralForecast([NHITS(...)]).fit", "NHITS(callbacks=)",
        ("neuralforecast",), "pytorch-lightning", ("neuralforecast.models",), neuralforecast_nhits,
    ),
    EntryPoint(
        "neuralforecast-patchtst", "NeuralForecast([PatchTST(...)]).fit", "PatchTST(callbacks=)",
        ("neuralforecast",), "pytorch-lightning", ("neuralforecast.models",),
        neuralforecast_patchtst,
    ),
    EntryPoint(
        "darts", "TransformerModel.fit", 'pl_trainer_kwargs={"callbacks": ...}',
        ("darts",), "pytorch-lightning", ("darts.models.forecasting.transformer_model",),
        darts_transformer,
    ),
    EntryPoint(
        "pytorch-forecasting", "Trainer.fit(TemporalFusionTransformer)", "Trainer(callbacks=)",
        ("pytorch-forecasting",), "lightning", ("pytorch_forecasting",), pytorch_forecasting_tft,
    ),
    EntryPoint(
        "gluonts", "PatchTSTEstimator.train_model", 'trainer_kwargs={"callbacks": ...}',
        ("gluonts",), "lightning", ("gluonts.torch", "gluonts.dataset.pandas"), gluonts_patchtst,
    ),
)  # fmt: skip
