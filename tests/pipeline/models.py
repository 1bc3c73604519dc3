"""Models that are hard to cut, each with one microbatch: ``MODELS[name]()``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT
from lightning_unitscale.pipeline import SplitPoint
from tests.helpers import IS_TORCH_2_11

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END
SIZE, LENGTH, WIDTH = 2, 8, 16


@dataclass
class Case:
    """A module with the arguments of one microbatch and three cuts.

    Attributes:
        module: In training mode, without random operations.
        kwargs: Makes the arguments of a microbatch.
        cuts: Cuts into four stages; the second alone makes two.
        tied: Whether stages share parameters.
    """

    module: nn.Module
    kwargs: Callable[[], dict[str, Any]]
    cuts: dict[str, SplitPoint]
    tied: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def spec(self, num_stages: int) -> dict[str, SplitPoint]:
        """The cuts for 2 or 4 stages."""
        cuts = list(self.cuts.items())
        return dict(cuts if num_stages == 4 else cuts[1:2])


class SkippingGPT(nn.Module):
    """The demo's GPT with its loss; its embedding is added again behind the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(width=WIDTH, depth=4, num_heads=2, context=LENGTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        gpt = self.gpt
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded = gpt.byte_embedding(tokens) + gpt.position_embedding(positions)
        x = embedded
        for block in gpt.blocks:
            x = block(x)
        logits = gpt.head(gpt.norm(x + 0.5 * embedded))
        loss = F.cross_entropy(logits.view(-1, 256), targets.reshape(-1))
        return {"logits": logits, "loss": loss}


class UNet(nn.Module):
    """Two levels down and up again, each upward level with the downward one's result beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Conv2d(3, 4, 3, padding=1)
        self.down1 = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.down2 = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.middle = nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1))
        self.up2 = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.exit = nn.Conv2d(8, 3, 1)

    def forward(self, noisy: Tensor, clean: Tensor) -> Tensor:
        x0 = F.relu(self.entry(noisy), inplace=True)
        x1 = F.silu(self.down1(x0))
        x2 = F.silu(self.down2(x1))
        x2 = self.middle(x2)
        y1 = torch.cat([self.up2(x2), x1], dim=1)
        y0 = torch.cat([self.up1(F.silu(y1)), x0], dim=1)
        return F.mse_loss(self.exit(y0), clean)


class Odd(nn.Module):
    """Frozen layers at the bottom, a buffer, a transposed boundary, a tuple, a mask, branches.

    The second embedding is only handed on by the stage that makes it, of which the engine's own
    split backward loses the gradient; ``never`` is computed and does not reach the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(5, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("offset", torch.randn(WIDTH), persistent=False)

    def forward(self, x: Tensor, kinds: Tensor, pairs: tuple[Tensor, float]) -> Tensor:
        y = torch.tanh(self.frozen(x))
        mask = torch.arange(x.shape[1], device=x.device) < 6
        left, right = self.first(y).chunk(2, dim=-1)
        across = (left * self.scale).transpose(1, 2)
        kind = self.embedding(kinds) + self.offset
        unused = self.never(right).sum()
        z = self.second(torch.matmul(right, torch.matmul(across, left)) / LENGTH)
        with torch.no_grad():
            shift = z.std()
        z = z + shift
        z = self.third(z * mask.unsqueeze(-1) + kind)
        weight, power = pairs
        value = self.last(z).squeeze(-1) * weight
        decay = 0.01 * self.last.weight.square().sum()
        return value.abs().pow(power).mean() + decay + 0 * unused.detach()


class Shared(nn.Module):
    """Within a stage: weights that are read several times, and operations with several results.

    The gradients of both are added up wrongly where torch 2.11 takes backward passes apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, 3 * WIDTH)
        self.repeated = nn.Linear(WIDTH, WIDTH)
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.exit = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, last = self.recurrent(torch.tanh(self.entry(x)))
        query, key, value = self.middle(x + last).chunk(3, dim=-1)
        for _ in range(3):
            query = torch.tanh(self.repeated(query) @ self.mixing)
        attended, weights = self.attention(query, key, value)
        loss = self.exit(attended).square().mean() + weights.amax()
        return loss + 0.01 * self.exit.weight.square().sum()


def _text(vocabulary: int = 256) -> Tensor:
    return torch.randint(3, vocabulary, (SIZE, LENGTH))


def _gpt() -> Case:
    return Case(
        SkippingGPT(),
        lambda: {"tokens": _text(), "targets": _text()},
        {"gpt.blocks.0": END, "gpt.blocks.2": BEGINNING, "gpt.blocks.3": BEGINNING},
        tied=True,
    )


def _unet() -> Case:
    return Case(
        UNet(),
        lambda: {"noisy": torch.randn(SIZE, 3, 8, 8), "clean": torch.randn(SIZE, 3, 8, 8)},
        {"down1": BEGINNING, "middle": BEGINNING, "up1": BEGINNING},
    )


def _odd() -> Case:
    return Case(
        Odd(),
        lambda: {
            "x": torch.randn(SIZE, LENGTH, WIDTH),
            "kinds": torch.randint(5, (SIZE, LENGTH)),
            "pairs": (torch.rand(SIZE, LENGTH), 2.0),
        },
        {"frozen": END, "second": BEGINNING, "third": BEGINNING},
    )


def _shared() -> Case:
    return Case(
        Shared(),
        lambda: {"x": torch.randn(SIZE, LENGTH, WIDTH)},
        {"recurrent": BEGINNING, "middle": BEGINNING, "exit": BEGINNING},
    )


def _hugging_face(model: str, config: str, cuts: dict[str, SplitPoint], **options: Any) -> Case:
    import transformers

    common = {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": 4,
              "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
              "eos_token_id": 2}  # fmt: skip
    made = getattr(transformers, config)(**{**common, **options})
    module = getattr(transformers, model)(made).train()
    for one in module.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
    tied = len(dict(module.named_parameters(remove_duplicate=False))) > len(
        dict(module.named_parameters())
    )
    return Case(module, lambda: {"input_ids": _text(64), "labels": _text(64)}, cuts, tied)


def _layers(path: str) -> dict[str, SplitPoint]:
    return {f"{path}.1": BEGINNING, f"{path}.2": BEGINNING, f"{path}.3": BEGINNING}


_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
       "decoder_start_token_id": 0, "dropout_rate": 0.0,
       # Its cache copies the configuration, which torch 2.11 cannot trace.
       "use_cache": not IS_TORCH_2_11}  # fmt: skip
_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LLAMA = {"intermediate_size": 32, "num_key_value_heads": 1}
_BERT = {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, Callable[[], Case]] = {
    "GPT": _gpt,
    "U-Net": _unet,
    "Odd": _odd,
    "Shared": _shared,
    "GPT-2": lambda: _hugging_face(
        "GPT2LMHeadModel", "GPT2Config", _layers("transformer.h"), **_QUIET
    ),
    "Llama": lambda: _hugging_face(
        "LlamaForCausalLM", "LlamaConfig", _layers("model.layers"), **_LLAMA
    ),
    "BERT": lambda: _hugging_face(
        "BertForMaskedLM", "BertConfig", _layers("bert.encoder.layer"), **_BERT
    ),
    "T5": lambda: _hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        {"encoder.block.1": BEGINNING, "decoder.block.0": BEGINNING, "decoder.block.1": BEGINNING},
        **_T5,
    ),
}
