"""Hugging Face models within a memory budget train bit-identically in a Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

from lightning_unitscale import RematCallback
from tests.callbacks.runs import QUIET
from tests.helpers import assert_same_bits
from tests.pipeline.hugging_face_run import Plain, adapted, batches, gpt2, llama
from tests.pipeline.pipeline_run import Recorder

pytestmark = pytest.mark.slow


def _fit(net: nn.Module, *callbacks: pl.Callback, precision: Any) -> tuple[list[float], Any]:
    pl.seed_everything(0, verbose=False)
    module, recorder = Plain(net), Recorder()
    trainer = pl.Trainer(
        max_epochs=1, precision=precision, callbacks=[recorder, *callbacks], **QUIET
    )
    trainer.fit(module, DataLoader(batches(), batch_size=None))
    return recorder.losses, module.state_dict()


def _assert_plain(make: Any, precision: Any = "32-true") -> None:
    torch.manual_seed(0)
    plain = _fit(make(), precision=precision)
    torch.manual_seed(0)
    remat = RematCallback("min_cut")
    assert_same_bits(_fit(make(), remat, precision=precision), plain)
    assert len(remat.reports) == 1


def test_autocast_is_not_active_in_backward_pass() -> None:
    _assert_plain(gpt2, "bf16-mixed")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying.*:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear", "lora_dropout": 0.1},
        {"modules_to_save": ["embed_tokens", "lm_head"], "use_rslora": True},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_lora_adapters_are_bit_identical(tied: bool, options: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    _assert_plain(lambda: adapted(llama(tie_word_embeddings=tied), **options))
