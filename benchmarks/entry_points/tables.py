"""Tabular data of all types, and counts of genes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .entry_point import EntryPoint, Trained, given


def pytorch_tabular(callbacks: list[Any], folder: Path) -> Trained:
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import FTTransformerConfig

    dice = np.random.default_rng(0)
    frame = pd.DataFrame(dice.standard_normal((192, 4)), columns=["a", "b", "c", "y"])
    frame["kind"] = dice.choice(["red", "green", "blue"], 192)
    model = TabularModel(
        data_config=DataConfig(
            target=["y"], continuous_cols=["a", "b", "c"], categorical_cols=["kind"]
        ),
        model_config=FTTransformerConfig(
            task="regression", input_embed_dim=32, num_heads=4, num_attn_blocks=2
        ),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=16, max_epochs=2, accelerator="cpu", progress_bar="none",
            checkpoints_path=str(folder),
        ),
    )  # fmt: skip
    model.fit(train=frame[:160], validation=frame[160:], **given(callbacks))
    metrics = dict(model.trainer.callback_metrics)
    return Trained(model.model, [metrics, model.predict(frame[160:])])


def scvi(callbacks: list[Any], folder: Path) -> Trained:
    from anndata import AnnData
    from scvi import settings
    from scvi.model import SCVI

    settings.seed = 1  # of its order of the cells
    dice = np.random.default_rng(0)
    cells = AnnData(dice.poisson(3 * dice.random((128, 100))).astype(np.float32))
    cells.obs["batch"] = dice.choice(["one", "two"], 128)
    SCVI.setup_anndata(cells, batch_key="batch")
    model = SCVI(cells, n_hidden=64)
    model.train(
        max_epochs=5,
        batch_size=32,
        train_size=0.8,
        check_val_every_n_epoch=2,
        accelerator="cpu",
        enable_progress_bar=False,
        default_root_dir=folder,
        **given(callbacks),
    )
    history = {name: frame.to_numpy(dtype=float) for name, frame in model.history.items()}
    # Its Trainer trains a plan, which holds the module.
    return Trained(model.trainer.lightning_module, [history, model.get_latent_representation()])


ENTRY_POINTS = (
    EntryPoint(
        "pytorch-tabular", "TabularModel.fit", "fit(callbacks=)", ("pytorch-tabular",),
        "pytorch-lightning", ("pytorch_tabular", "pytorch_tabular.models"), pytorch_tabular,
    ),
    EntryPoint(
        "scvi", "SCVI.train", "train(callbacks=)", ("scvi-tools",), "lightning",
        ("scvi.model", "anndata"), scvi,
    ),
)  # fmt: skip
