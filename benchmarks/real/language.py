"""Language models on random tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .project import Loss, Made, Project, loader

_VOCABULARY = 128


def _tokens() -> Tensor:
    return torch.randint(_VOCABULARY, (4, 33))


def _next_token(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def lightning_transformer() -> Made:
    """Lightning's demo, which hands a causal mask to ``nn.TransformerEncoder``.

    Its own LightningModule downloads a text; this is its step on tokens from here.
    """
    from lightning.pytorch.demos import Transformer

    def loss(model: Any, tokens: Tensor) -> Tensor:
        found = model(tokens[:, :-1], tokens[:, 1:])
        return F.nll_loss(found, tokens[:, 1:].flatten())

    return Loss(Transformer(vocab_size=_VOCABULARY), loss, rate=0.01), loader(_tokens)


def x_transformers() -> Made:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    model = AutoregressiveWrapper(
        TransformerWrapper(
            num_tokens=_VOCABULARY,
            max_seq_len=32,
            attn_layers=Decoder(
                dim=64, depth=2, heads=4, attn_dim_head=16, rotary_pos_emb=True, ff_glu=True,
                attn_dropout=0.1, ff_dropout=0.1,
            ),
        )
    )  # fmt: skip
    return Loss(model, lambda model, tokens: model(tokens)), loader(_tokens)


def litgpt() -> Made:
    from litgpt import GPT, Config

    model = GPT(
        Config(
            block_size=32, vocab_size=_VOCABULARY, padded_vocab_size=_VOCABULARY, n_layer=2,
            n_head=4, n_query_groups=2, n_embd=64, intermediate_size=128, norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP", rotary_percentage=1.0, bias=False, parallel_residual=False,
        )
    )  # fmt: skip
    return Loss(model, _next_token), loader(_tokens)


def transformers_gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=_VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    )
    return Loss(model, lambda model, ids: model(input_ids=ids, labels=ids).loss), loader(_tokens)


def transformers_t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    return Loss(model, lambda model, ids: model(input_ids=ids, labels=ids).loss), loader(_tokens)


PROJECTS = (
    Project("lightning-transformer", ("lightning",), lightning_transformer),
    Project("x-transformers", ("x-transformers",), x_transformers),
    Project("litgpt", ("litgpt",), litgpt),
    Project("transformers-gpt2", ("transformers",), transformers_gpt2),
    Project("transformers-t5", ("transformers",), transformers_t5),
)
