"""Hugging Face models as pipelines.

Run ``python -m tests.pipeline.hugging_face_run FOLDER NUM_RANKS CASE ...`` as every rank. With
one rank each case trains on one device, without the strategy. Every rank writes what it computed to
``FOLDER/CASE-RANK.pt``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.pipeline.pipeline_run import Recorder, fit_and_save
from tests.pipeline.trainers import quiet_trainer

WORDS, LENGTH, SAMPLES, STEPS = 64, 12, 8, 3


def gpt2(**options: Any) -> nn.Module:
    """A GPT-2, whose output layer is its embedding."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> nn.Module:
    """A Llama."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    """A BERT that fills masked words in."""
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    """A T5."""
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


class Plain(pl.LightningModule):
    """A step as most people write it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        return torch.optim.AdamW(trained, 0.01)


class Reads(Plain):
    """Reads numbers, and uses logits and the loss of a library's own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(**batch)
        self.log("train_loss", out.loss.item())
        self.log("accuracy", (out.logits.argmax(-1) == batch["labels"]).float().mean().item())
        return out.loss


class OwnLoss(Plain):
    """Computes the loss of the logits, by values that it reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
        count = int((labels != -100).sum())
        return losses.sum() / count


class Late(Plain):
    """Makes the model where Lightning wants large ones to be made."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        pl.LightningModule.__init__(self)
        self.make = make
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.make()


class Generates(Late):
    """A module whose validation generates text."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.eval()
        written = self.net.generate(batch["input_ids"][:2, :4], max_new_tokens=3, do_sample=False)
        self.log("written", written.float().sum(), sync_dist=True)


class Draws(Late):
    """Makes a model whose weights are others on each rank."""

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)
        super().configure_model()


def checkpointed(net: nn.Module) -> nn.Module:
    """The model, whose blocks compute their activations again."""
    net.gradient_checkpointing_enable()
    return net


def adapted(net: nn.Module, **options: Any) -> nn.Module:
    """The model with adapters made by ``peft``, whose blocks compute their activations again."""
    import peft

    net = peft.get_peft_model(net, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **options))
    net.enable_input_require_grads()
    return checkpointed(net)


def save_pretrained(folder: Path) -> None:
    """Save the weights that the ranks read; among ranks only the first one would write them."""
    torch.manual_seed(0)
    gpt2().save_pretrained(folder / "pretrained")


def _read(folder: Path) -> nn.Module:
    return checkpointed(transformers.GPT2LMHeadModel.from_pretrained(folder / "pretrained"))


CASES: dict[str, Callable[[Path], pl.LightningModule]] = {
    "bert": lambda _: Plain(bert()),
    "t5": lambda _: Plain(t5()),
    "own loss": lambda _: OwnLoss(llama()),
    "late": lambda folder: Generates(lambda: _read(folder)),
    "bf16": lambda _: Reads(gpt2()),
    "dropout": lambda _: Plain(_with_dropout()),
    "callbacks": lambda _: Plain(llama()),
    "u-mup": lambda _: Plain(llama()),
}
# These need peft.
ADAPTED: dict[str, Callable[[Path], pl.LightningModule]] = {
    "adapters": lambda _: Draws(
        lambda: adapted(
            llama(tie_word_embeddings=True, use_cache=True), target_modules="all-linear"
        )
    ),
    "adapters read": lambda _: Reads(adapted(gpt2(), modules_to_save=["wte"], use_rslora=True)),
}
WITHOUT_DROPOUT = "without dropout"


def module_of(case: str, folder: Path) -> pl.LightningModule:
    """The module of a case."""
    if case == WITHOUT_DROPOUT:
        return Plain(gpt2())
    return {**CASES, **ADAPTED}[case](folder)


CALLBACKS: dict[str, Callable[[], list[pl.Callback]]] = {
    "callbacks": lambda: [UnitScaleCallback(remat="min_cut"), ScaleMonitor(1)],
    "u-mup": lambda: [UnitScaleCallback("u-mup")],
}


def _with_dropout() -> nn.Module:
    net = gpt2()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return net


def batches() -> list[BatchEncoding]:
    """Batches in which each part of two samples has another number of tokens and labels."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(5, WORDS, (SAMPLES, LENGTH), generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        labels[:2] = -100
        labels[2, 3:] = -100
        for sample, length in ((3, 5), (5, 9), (7, 2)):
            ids[sample, length:] = 0
            mask[sample, length:] = 0
            labels[sample, length:] = -100
        found.append(BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels}))
    return found


def train(folder: Path, case: str, num_ranks: int) -> None:
    """Train and write the results."""
    pl.seed_everything(4, workers=True, verbose=False)
    module, recorder = module_of(case, folder), Recorder()
    callbacks = [recorder, *CALLBACKS.get(case, list)()]
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = PipelineStrategy(
            "1F1B", num_microbatches=4, process_group_backend="gloo", timeout=60
        )
    validates = isinstance(module, Generates)
    trainer = quiet_trainer(
        folder,
        devices=num_ranks,
        strategy=strategy,
        precision="bf16-mixed" if case == "bf16" else "32-true",
        max_epochs=1,
        callbacks=callbacks,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=1 if validates else 0,
    )
    data = DataLoader(batches(), batch_size=None)
    fit_and_save(folder, case, trainer, recorder, module, data, data if validates else None)
    trainer.save_checkpoint(folder / f"{case}.ckpt")


def main(folder: Path, num_ranks: int, *cases: str) -> None:
    """Train all of the cases, one after the other."""
    quiet_rank()
    transformers.logging.set_verbosity_error()
    for one in cases:
        train(folder, one, num_ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
