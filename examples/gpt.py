"""A byte-level GPT as a LightningModule, in one file.

Pre-norm decoder blocks with learned positions, following Radford et al. (2019), "Language Models
are Unsupervised Multitask Learners". A byte is a token, so there is no tokenizer, and the losses
are in nats per byte. Shapes in the comments: B sequences, T positions, C = width, H heads.
"""

import math
from collections.abc import Callable
from typing import Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

VOCAB_SIZE = 256


class CausalSelfAttention(nn.Module):
    """Each position attends to itself and to the positions before it."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out_dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )  # (B, H, T, C / H)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.out_dropout(self.out(y))


class MLP(nn.Module):
    """Two linear layers with four times the width between them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))  # (B, T, C) -> (B, T, 4C) -> (B, T, C)


class Block(nn.Module):
    """Attention, then an MLP. Each reads the normalized residual stream and adds its result to
    it."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(pl.LightningModule):
    """A byte-level GPT: predicts each byte from those before it.

    Args:
        width: Size of the residual stream; a multiple of `num_heads`.
        depth: Number of blocks.
        num_heads: Attention heads per block.
        context: Number of bytes that the model can attend to.
        dropout: Probability of dropping an activation, in [0, 1).
        tied_head: Whether the output layer shares its weight with the byte embedding.
        optimizer: `"adamw"`, or `"sgd"` with momentum.
        learning_rate: Peak learning rate, reached at the end of the warm-up.
        weight_decay: Decay of the weight matrices and embeddings; biases and gains have none.
        betas: AdamW's two averaging factors.
        momentum: SGD's momentum.
        warmup_steps: Optimizer steps over which the learning rate rises linearly from zero.
        decay_steps: Optimizer steps after which the cosine has brought the learning rate down to a
            tenth of its peak, where it stays; by default the length of the run, which is then part
            of what a resumed run must repeat.

    Raises:
        ValueError: If `width` is not a multiple of `num_heads`.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        tied_head: bool = True,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.9,
        warmup_steps: int = 30,
        decay_steps: int | None = None,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(
                f"`width={width}`: {num_heads} heads cannot share it equally. Expected a multiple "
                f"of `num_heads`. Change one of the two."
            )
        self.save_hyperparameters()
        self.context = context
        self.byte_embedding = nn.Embedding(VOCAB_SIZE, width)
        self.position_embedding = nn.Embedding(context, width)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)
        self._init_weights(depth)
        if tied_head:
            self.head.weight = self.byte_embedding.weight

    def _init_weights(self, depth: int) -> None:
        """GPT-2's: std 0.02, smaller for the 2 * depth layers that add to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                adds_to_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                std = 0.02 / math.sqrt(2 * depth) if adds_to_residual else 0.02
                nn.init.normal_(parameter, std=std)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes, (B, T) integers, to the logits of the next byte: (B, T, 256)."""
        num_positions = tokens.shape[1]
        if num_positions > self.context:
            raise ValueError(
                f"`tokens` of {num_positions} positions: more than the model's context of "
                f"{self.context}; give the model and the data the same `context`."
            )
        positions = torch.arange(num_positions, device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        x = self.embedding_dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats per byte for the (B, T) inputs and targets of a
        batch."""
        tokens, targets = batch
        logits = self(tokens)  # (B, T, 256)
        return F.cross_entropy(logits.view(-1, VOCAB_SIZE), targets.reshape(-1))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True, batch_size=len(batch[0]), sync_dist=True)
        return loss

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("test_loss", loss, batch_size=len(batch[0]), sync_dist=True)
        return loss

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the most likely next byte at each position: (B, T)."""
        return self(batch[0]).argmax(dim=-1)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, with decay on matrices only, and its schedule, updated every
        step."""
        hparams = self.hparams
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": hparams["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer
        if hparams["optimizer"] == "adamw":
            # A list, if the hyperparameters come from YAML.
            betas = tuple(hparams["betas"])
            optimizer = torch.optim.AdamW(groups, hparams["learning_rate"], betas)
        else:
            optimizer = torch.optim.SGD(groups, hparams["learning_rate"], hparams["momentum"])
        schedule = LambdaLR(optimizer, self._learning_rate_factor())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _learning_rate_factor(self) -> Callable[[int], float]:
        """Returns step -> fraction of the peak: linear warm-up, then a cosine down to a tenth."""
        warmup = self.hparams["warmup_steps"]
        total = self.hparams["decay_steps"] or self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            progress = min(1.0, (step - warmup) / max(1, total - warmup))
            return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2

        return factor
