"""Language models trained on preferences and rewards, adapters, and cached gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .entry_point import EntryPoint, Trained
from .language import (
    SENTENCES,
    VOCABULARY,
    hugging_face,
    losses_of,
    sentence_encoder,
    tokenizer,
)

_QUIET: dict[str, Any] = {"logging_steps": 1, "use_cpu": True, "report_to": []}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def _saved_llama(folder: Path) -> str:
    """A path: these trainers load the model a second time, as what is not trained."""
    _llama().save_pretrained(folder / "llama")
    tokenizer().save_pretrained(folder / "llama")
    return str(folder / "llama")


def dpo(callbacks: list[Any], folder: Path) -> Trained:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    prompts = [" ".join(sentence.split()[:2]) for sentence in SENTENCES]
    rows = {"prompt": prompts, "chosen": SENTENCES, "rejected": SENTENCES[::-1]}
    trainer = DPOTrainer(
        model=_saved_llama(folder),
        args=DPOConfig(
            str(folder), max_steps=20, per_device_train_batch_size=4, bf16=False, **_QUIET
        ),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        **hugging_face(callbacks),
    )
    trainer.train()
    return Trained(trainer.model, losses_of(trainer))


def grpo(callbacks: list[Any], folder: Path) -> Trained:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    words = tokenizer()
    words.padding_side = "left"
    trainer = GRPOTrainer(
        model=_saved_llama(folder),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(
            str(folder), max_steps=20, per_device_train_batch_size=4, num_generations=4,
            num_iterations=2, max_completion_length=8, beta=0.1, bf16=False, **_QUIET,
        ),
        train_dataset=Dataset.from_dict({"prompt": [text[:9] for text in SENTENCES]}),
        processing_class=words,
        **hugging_face(callbacks),
    )  # fmt: skip
    trainer.train()
    numbers = [{key: row[key] for key in row if "time" not in key} for row in losses_of(trainer)]
    return Trained(trainer.model, numbers)


def peft_lora(callbacks: list[Any], folder: Path) -> Trained:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    adapters = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(_llama(), adapters)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder), max_steps=20, per_device_train_batch_size=4, gradient_checkpointing=True,
            **_QUIET,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 16))],
        **hugging_face(callbacks),
    )  # fmt: skip
    trainer.train()
    return Trained(model, losses_of(trainer))


def cached_gradients(callbacks: list[Any], folder: Path) -> Trained:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    model = sentence_encoder(folder)
    # It encodes without gradients, and again in a hook of the backward pass.
    inner = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            str(folder), max_steps=20, per_device_train_batch_size=8, **_QUIET
        ),
        train_dataset=Dataset.from_dict({"anchor": SENTENCES, "positive": SENTENCES[::-1]}),
        loss=losses.MatryoshkaLoss(model, inner, [32, 16]),
        **hugging_face(callbacks),
    )
    trainer.train()
    return Trained(model, losses_of(trainer))


_TRL = ("trl", "datasets")

ENTRY_POINTS = (
    EntryPoint(
        "trl-dpo", "DPOTrainer.train", "HFCallback", _TRL, "transformers",
        ("trl.trainer.dpo_trainer", "datasets"), dpo,
    ),
    EntryPoint(
        "trl-grpo", "GRPOTrainer.train", "HFCallback", _TRL, "transformers",
        ("trl.trainer.grpo_trainer", "datasets"), grpo,
    ),
    EntryPoint(
        "peft", "Trainer.train", "HFCallback", ("peft",), "transformers", ("peft",), peft_lora,
    ),
    EntryPoint(
        "sentence-transformers-cached", "SentenceTransformerTrainer.train", "HFCallback",
        ("sentence-transformers", "datasets"), "transformers",
        ("sentence_transformers", "datasets"), cached_gradients,
    ),
)  # fmt: skip
