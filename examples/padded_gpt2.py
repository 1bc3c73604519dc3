"""Train a Hugging Face GPT-2 on sentences of different lengths, on one device or as a pipeline.

    python -m examples.padded_gpt2 RUN                # one process
    python -m examples.padded_gpt2 RUN --devices 2    # two stages, four microbatches

Padding and prompts have the label -100, so the number of tokens in the loss differs between
microbatches. Both runs have the same losses: see ``RUN/losses-1.json`` and ``RUN/losses-2.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_unitscale import PipelineStrategy

END, WORDS = 0, 64


class PaddedGPT2(pl.LightningModule):
    """A GPT-2 that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=END, eos_token_id=END,
        )  # fmt: skip
        self.net = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the tokens with a label."""
        loss: Tensor = self.net(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with a constant rate."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded(sentences: list[Tensor]) -> dict[str, Tensor]:
    """A batch: sentences up to the length of the longest, of which the first three are a prompt."""
    length = max(map(len, sentences))
    ids = torch.full((len(sentences), length), END)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)] = sentence
        mask[row, : len(sentence)] = 1
        labels[row, 3 : len(sentence)] = sentence[3:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sentences(count: int) -> list[Tensor]:
    """Sentences of 2 to 16 words that count upwards. Short ones have no labels."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 17, (count,), generator=generator)
    starts = torch.randint(1, WORDS - 16, (count,), generator=generator)
    return [
        torch.arange(int(start), int(start + length))
        for start, length in zip(starts, lengths, strict=True)
    ]


class Losses(pl.Callback):
    """A callback that stores the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        """Store the loss of a step."""
        self.losses.append(float(outputs["loss"]))


def main() -> None:
    """Train for one epoch and write the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    pl.seed_everything(1)
    strategy = PipelineStrategy("1F1B", num_microbatches=4) if options.devices > 1 else "auto"
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=strategy,
        max_epochs=1,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=options.folder,
    )
    data: Any = sentences(80)
    trainer.fit(PaddedGPT2(), DataLoader(data, batch_size=8, collate_fn=padded))
    if trainer.is_global_zero:
        path = options.folder / f"losses-{options.devices}.json"
        path.write_text(json.dumps(losses.losses))


if __name__ == "__main__":
    main()
