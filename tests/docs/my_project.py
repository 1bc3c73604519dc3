"""The ``my_project`` of the pages: a small module, and batches for two short epochs."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class MyModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hidden = (layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU()))
        self.layers = nn.Sequential(nn.Linear(16, 32), *hidden, nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class MyData(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        numbers = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(numbers), batch_size=128)

    val_dataloader = train_dataloader
