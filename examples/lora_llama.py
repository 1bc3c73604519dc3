"""LoRA on a small Llama within a memory budget, in one file.

The weights of the model are frozen, and each linear layer gets two small factors that are trained
(Hu et al. (2021), "LoRA: Low-Rank Adaptation of Large Language Models"). ``RematCallback`` decides
which values to keep for the backward pass and which to recompute, within a budget for all bytes
alive at once. Losses and weights are those of a run without it.

    python examples/lora_llama.py --budget 0.3

To use your own Llama, call ``LlamaForCausalLM.from_pretrained(...)``. You can also replace
``add_lora`` with ``peft.get_peft_model(...)``.
"""

import argparse
from collections.abc import Collection

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from examples.text import TextDataModule
from lightning_unitscale import RematCallback

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A frozen linear layer plus `scale * up(down(x))`, of which `up` begins with zeros."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.scale = scale
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.scale * self.up(self.down(x))
        return y


def add_lora(model: nn.Module, rank: int, scale: float, targets: Collection[str]) -> None:
    """Freeze a model and replace each layer with one of these names by a `LoraLinear`."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, rank, scale))


class LoraLlama(pl.LightningModule):
    """A Llama over bytes with random weights and trainable factors.

    Args:
        width: Features per position.
        depth: Number of decoder layers.
        rank: Rank of the factors.
        learning_rate: Of AdamW.
    """

    def __init__(
        self, width: int = 64, depth: int = 4, rank: int = 4, learning_rate: float = 1e-3
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=depth,
            num_attention_heads=4,
            use_cache=False,
        )
        self.net = LlamaForCausalLM(config)
        add_lora(self.net, rank, 2.0, TARGETS)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, _ = batch  # the model shifts its labels itself
        loss: Tensor = self.net(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, _ = batch
        self.log("val_loss", self.net(input_ids=tokens, labels=tokens).loss, prog_bar=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=0.3, help="0 is least, 1 the plain peak")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    remat = RematCallback(arguments.budget)
    trainer = pl.Trainer(max_steps=arguments.steps, callbacks=[remat])
    trainer.fit(LoraLlama(), TextDataModule(context=128, batch_size=8))
    print(remat.explain())


if __name__ == "__main__":
    main()
