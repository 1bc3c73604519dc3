"""Language models with Lightning Fabric and Hugging Face's Trainer."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from .entry_point import EntryPoint, Trained, given

VOCABULARY = 64


def litgpt_pretrain(callbacks: list[Any], folder: Path) -> Trained:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger
    from litgpt import GPT, Config
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule
    from litgpt.pretrain import main

    class Tokens(DataModule):
        def connect(self, **_: Any) -> None:
            self.rows = torch.randint(VOCABULARY, (48, 33))

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.rows[:40], batch_size=2)

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.rows[40:], batch_size=2)

    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=1, loggers=[logger], **given(callbacks))
    fabric.launch()
    # With a checkpoint it saves the arguments of its command line.
    sys.argv = ["litgpt", "tiny"]
    config = Config(
        block_size=32, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, n_layer=2, n_head=4,
        n_query_groups=2, n_embd=64, intermediate_size=128, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", rotary_percentage=1.0, bias=False, parallel_residual=False,
    )  # fmt: skip
    main(
        fabric=fabric,
        devices=1,
        seed=1,
        initial_checkpoint_dir=None,
        resume=False,
        config=config,
        data=Tokens(),
        out_dir=folder,
        tokenizer_dir=None,
        tokenizer=None,
        train=TrainArgs(
            global_batch_size=4, micro_batch_size=2, max_tokens=20 * 4 * 32, max_norm=1.0,
            lr_warmup_steps=2, log_interval=1, save_interval=10,
        ),
        eval=EvalArgs(interval=10, max_iters=2, initial_validation=True),
        optimizer="AdamW",
    )  # fmt: skip
    # It returns nothing and leaves a checkpoint.
    model = GPT(config)
    saved = torch.load(folder / "final" / "lit_model.pth", weights_only=False)
    model.load_state_dict(saved["model"])
    # The monitor's numbers are rows of their own among these.
    rows = [*csv.DictReader(next(folder.rglob("metrics.csv")).read_text().splitlines())]
    losses = {
        name: [float(row[name]) for row in rows if row[name]] for name in ("loss", "val_loss")
    }
    return Trained(model, losses)


SENTENCES = tuple(
    f"the {kind} {thing} is {state}"
    for kind in ("small", "old", "red", "quiet")
    for thing in ("house", "river", "engine", "garden")
    for state in ("empty", "full", "far away", "nearby")
)


def tokenizer() -> Any:
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[EOS]"]
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    vocabulary = {word: index for index, word in enumerate([*special, *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]",
        model_max_length=32,
    )  # fmt: skip


def hugging_face(callbacks: list[Any]) -> dict[str, list[Any]]:
    from lightning_unitscale import HFCallback

    return {"callbacks": [HFCallback(callbacks)]} if callbacks else {}


def sentence_encoder(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer().save_pretrained(folder / "bert")
    words = models.Transformer(str(folder / "bert"))
    return SentenceTransformer(modules=[words, models.Pooling(32)], device="cpu")


def sentence_transformers(callbacks: list[Any], folder: Path) -> Trained:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    model = sentence_encoder(folder)
    rows = Dataset.from_dict({"anchor": SENTENCES, "positive": SENTENCES[::-1]})
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(folder), max_steps=20, per_device_train_batch_size=8, logging_steps=1,
            eval_strategy="steps", eval_steps=10, save_steps=10, use_cpu=True, report_to=[],
        ),
        train_dataset=rows,
        eval_dataset=rows.select(range(16)),
        loss=losses.MultipleNegativesRankingLoss(model),
        **hugging_face(callbacks),
    )  # fmt: skip
    trainer.train()
    return Trained(model, [losses_of(trainer), model.encode(list(SENTENCES[:4]))])


def trl_sft(callbacks: list[Any], folder: Path) -> Trained:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    rows = Dataset.from_dict({"text": SENTENCES})
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=str(folder), max_steps=20, per_device_train_batch_size=4, max_length=32,
            gradient_accumulation_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=10,
            use_cpu=True, bf16=False, report_to=[],
        ),
        train_dataset=rows,
        eval_dataset=rows.select(range(16)),
        processing_class=tokenizer(),
        **hugging_face(callbacks),
    )  # fmt: skip
    trainer.train()
    return Trained(trainer.model, losses_of(trainer))


def setfit(callbacks: list[Any], folder: Path) -> Trained:
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    model = SetFitModel(model_body=sentence_encoder(folder), model_head=LogisticRegression())
    labels = [int(sentence.endswith("empty")) for sentence in SENTENCES]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder), batch_size=8, max_steps=20, logging_steps=1, report_to="none",
        ),
        train_dataset=Dataset.from_dict({"text": SENTENCES, "label": labels}),
        **hugging_face(callbacks),
    )  # fmt: skip
    trainer.train()
    found = losses_of(trainer.st_trainer)
    return Trained(model.model_body, [found, model.predict_proba(list(SENTENCES[:8]))])


def losses_of(trainer: Any) -> Any:
    """What a Hugging Face Trainer has logged, without its times."""
    return [
        {name: row[name] for name in row if "runtime" not in name and "_per_" not in name}
        for row in trainer.state.log_history
    ]


ENTRY_POINTS = (
    EntryPoint(
        "litgpt", "litgpt.pretrain.main", "Fabric(callbacks=)", ("litgpt",), "lightning",
        ("litgpt.pretrain",), litgpt_pretrain,
    ),
    EntryPoint(
        "sentence-transformers", "SentenceTransformerTrainer.train", "HFCallback",
        ("sentence-transformers", "datasets"), "transformers",
        ("sentence_transformers", "datasets"), sentence_transformers,
    ),
    EntryPoint(
        "trl", "SFTTrainer.train", "HFCallback", ("trl", "datasets"), "transformers",
        ("trl.trainer.sft_trainer", "datasets"), trl_sft,
    ),
    EntryPoint(
        "setfit", "Trainer.train", "HFCallback", ("setfit", "datasets"), "transformers",
        ("setfit", "datasets"), setfit,
    ),
)  # fmt: skip
