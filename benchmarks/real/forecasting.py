"""Forecasters: the packages' own LightningModules on noisy sums of sines."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .hourly import hourly_dataset, hourly_frame
from .project import Made, Project, loader

_HISTORY, _HORIZON = 24, 6


def _neuralforecast(name: str, **options: Any) -> Made:
    import neuralforecast.models
    from neuralforecast.losses.pytorch import MAE
    from neuralforecast.tsdataset import TimeSeriesDataset, TimeSeriesLoader

    dataset, *_ = TimeSeriesDataset.from_df(hourly_frame().drop(columns="time"))
    model = getattr(neuralforecast.models, name)(
        h=_HORIZON, input_size=_HISTORY, loss=MAE(), windows_batch_size=32, **options
    )
    return model, TimeSeriesLoader(dataset, batch_size=4)


def nhits() -> Made:
    return _neuralforecast("NHITS", mlp_units=3 * [[64, 64]])


def patchtst() -> Made:
    return _neuralforecast(
        "PatchTST", hidden_size=32, linear_hidden_size=64, n_heads=4, encoder_layers=2, patch_len=8
    )


def lstm() -> Made:
    return _neuralforecast("LSTM", encoder_hidden_size=32, decoder_hidden_size=32)


def _pytorch_forecasting(name: str, **options: Any) -> Made:
    import pytorch_forecasting as pf

    dataset = hourly_dataset(_HISTORY, _HORIZON)
    model = getattr(pf, name).from_dataset(dataset, log_interval=-1, **options)
    batches = iter(dataset.to_dataloader(train=True, batch_size=16, num_workers=0))
    return model, loader(lambda: next(batches))


def temporal_fusion_transformer() -> Made:
    return _pytorch_forecasting(
        "TemporalFusionTransformer", hidden_size=16, attention_head_size=2, dropout=0.1
    )


def deepar() -> Made:
    return _pytorch_forecasting("DeepAR", hidden_size=16, rnn_layers=2, dropout=0.1)


def gluonts_patchtst() -> Made:
    from gluonts.torch.distributions import StudentTOutput
    from gluonts.torch.model.patch_tst.lightning_module import PatchTSTLightningModule

    module = PatchTSTLightningModule(
        {
            "prediction_length": _HORIZON,
            "context_length": _HISTORY,
            "patch_len": 8,
            "stride": 4,
            "padding_patch": "end",
            "d_model": 32,
            "nhead": 4,
            "dim_feedforward": 64,
            "num_feat_dynamic_real": 0,
            "dropout": 0.1,
            "activation": "relu",
            "norm_first": False,
            "num_encoder_layers": 2,
            "scaling": "mean",
            "distr_output": StudentTOutput(),
        }
    )

    def batch() -> dict[str, torch.Tensor]:
        series = torch.sin(torch.arange(_HISTORY + _HORIZON) / (2 + 6 * torch.rand(16, 1)))
        past, future = (series + 0.1 * torch.randn(series.shape)).split([_HISTORY, _HORIZON], 1)
        return {
            "past_target": past,
            "past_observed_values": torch.ones_like(past),
            "future_target": future,
            "future_observed_values": torch.ones_like(future),
        }

    return module, loader(batch)


def darts_transformer() -> Made:
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
        force_reset=True,
        save_checkpoints=False,
        random_state=1,
    )
    values = hourly_frame()["y"].to_numpy(np.float32).reshape(8, -1)
    series = [TimeSeries.from_values(row) for row in values]
    # What fit() does up to the point at which it calls its Trainer.
    _, options = model._setup_for_fit_from_dataset(series)
    ready = model._setup_for_train(**options)
    torch.manual_seed(1)
    return ready["model"], ready["datamodule"].train_dataloader()


_NEURAL = ("neuralforecast",)
PROJECTS = (
    Project("neuralforecast-nhits", _NEURAL, nhits),
    Project("neuralforecast-patchtst", _NEURAL, patchtst),
    Project("neuralforecast-lstm", _NEURAL, lstm),
    Project(
        "pytorch-forecasting-tft",
        ("pytorch-forecasting",),
        temporal_fusion_transformer,
        {"gradient_clip_val": 0.1},
    ),
    Project("pytorch-forecasting-deepar", ("pytorch-forecasting",), deepar),
    Project("gluonts-patchtst", ("gluonts",), gluonts_patchtst),
    Project("darts-transformer", ("darts",), darts_transformer),
)
