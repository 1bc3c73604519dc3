"""Peaks of training steps measured on a GPU, and their predictions on a CPU.

    python benchmarks/measured_peaks.py                 # all models
    python benchmarks/measured_peaks.py vit_b_16 bert   # some

``results/measured_peaks.json`` has the measured peaks with device and versions: the most bytes in
the third step with AdamW, ``torch.cuda.max_memory_allocated`` without what earlier models had left
(cuDNN's dropout states), and ``max_memory_reserved``. The script adds predictions and errors. The
models need the versions of transformers and torchvision that were measured:

    pip install --no-deps --target DIR transformers==5.17.0 torchvision==0.28.0 'huggingface_hub<2'
    PYTHONPATH=DIR:. python benchmarks/measured_peaks.py
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measure import RESULTS
from tabulate import tabulate
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]
"""A module whose result is the loss, and the arguments of its forward."""
MIB = 2**20
PATH = RESULTS / "measured_peaks.json"
_SMALL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
          "num_attention_heads": 12, "vocab_size": 32000}  # fmt: skip


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], bf16: bool = False) -> None:
        super().__init__()
        self.model, self.loss, self.bf16 = model, loss, bf16

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        if named:
            with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
                own: Tensor = self.model(**named).loss
            return own
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
            result = self.model(*given[:-1])
        return self.loss(result.float(), given[-1])


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], vocabulary: int, width: int, **options: Any) -> None:
        super().__init__()
        self.e = nn.Embedding(vocabulary, 512)
        self.l = kind(512, width, batch_first=True, **options)
        self.o = nn.Linear(width * (1 + self.l.bidirectional), vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.o(self.l(self.e(x))[0]).flatten(0, 1)
        return result


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Transformer(512, 8, 4, 4, 2048, batch_first=True)
        self.o = nn.Linear(512, 512)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.o(self.m(x, y))
        return result


def _torchvision() -> Any:
    """Import torchvision's models, also where its compiled operators do not load."""
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
        return importlib.import_module("torchvision.models")


_LIBRARIES: list[torch.library.Library] = []  # they undo their definitions when they go


def _images(name: str, batch: int = 32, bf16: bool = False, **options: Any) -> Case:
    model = getattr(_torchvision(), name)(**options)
    given = torch.empty(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
    return _WithLoss(model, F.cross_entropy, bf16), given, {}


def _tokens(
    model: str,
    config: str,
    batch: int,
    length: int,
    bf16: bool = False,
    checkpoint: bool = False,
    **options: Any,
) -> Case:
    transformers = importlib.import_module("transformers")
    network = getattr(transformers, model)(getattr(transformers, config)(**options))
    if checkpoint:
        network.gradient_checkpointing_enable({"use_reentrant": False})
        network.train()
    ids = torch.zeros(batch, length, dtype=torch.long)
    return _WithLoss(network, F.cross_entropy, bf16), (), {"input_ids": ids, "labels": ids.clone()}


def _lstm() -> Case:
    ids = torch.zeros(64, 128, dtype=torch.long)
    model = _Recurrent(nn.LSTM, 10000, 1024, num_layers=3, dropout=0.1)
    return _WithLoss(model, F.cross_entropy), (ids, ids.flatten()), {}


def _translator() -> Case:
    x, y = torch.empty(16, 256, 512), torch.empty(16, 256, 512)
    return _WithLoss(_Translator(), F.mse_loss), (x, y, y), {}


MODELS: dict[str, Callable[[], Case]] = {
    "resnet50": lambda: _images("resnet50"),
    "resnet50-bf16": lambda: _images("resnet50", bf16=True),
    "vit_b_16": lambda: _images("vit_b_16"),
    "swin_t": lambda: _images("swin_t"),
    "vgg16": lambda: _images("vgg16", 16),
    "lstm": _lstm,
    "nn.Transformer": _translator,
    "gpt2": lambda: _tokens("GPT2LMHeadModel", "GPT2Config", 8, 512),
    "gpt2-bf16": lambda: _tokens("GPT2LMHeadModel", "GPT2Config", 8, 512, True),
    "llama-gqa-bf16": lambda: _tokens(
        "LlamaForCausalLM", "LlamaConfig", 8, 1024, True, hidden_size=1024, intermediate_size=2816,
        num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000,
    ),
    "t5-small": lambda: _tokens(
        "T5ForConditionalGeneration", "T5Config", 8, 256, decoder_start_token_id=0, pad_token_id=0
    ),
    "mixtral-bf16": lambda: _tokens(
        "MixtralForCausalLM", "MixtralConfig", 4, 512, True, hidden_size=512,
        intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=16000, num_local_experts=4,
    ),
    "densenet121": lambda: _images("densenet121"),
    "efficientnet_b0": lambda: _images("efficientnet_b0"),
    "mobilenet_v3_large": lambda: _images("mobilenet_v3_large", 64),
    "convnext_tiny": lambda: _images("convnext_tiny"),
    "regnet_y_1_6gf-bf16": lambda: _images("regnet_y_1_6gf", bf16=True),
    "vit_b_16-bf16": lambda: _images("vit_b_16", bf16=True),
    "swin_t-bf16": lambda: _images("swin_t", bf16=True),
    "googlenet": lambda: _images("googlenet", aux_logits=False, init_weights=False),
    "resnet18-b128": lambda: _images("resnet18", 128),
    "vgg11_bn-bf16": lambda: _images("vgg11_bn", 16, True),
    "bert": lambda: _tokens("BertForMaskedLM", "BertConfig", 16, 256),
    "bert-bf16": lambda: _tokens("BertForMaskedLM", "BertConfig", 16, 256, True),
    "distilbert": lambda: _tokens("DistilBertForMaskedLM", "DistilBertConfig", 16, 256),
    "gpt-neox-bf16": lambda: _tokens("GPTNeoXForCausalLM", "GPTNeoXConfig", 4, 512, True, **_SMALL),
    "opt": lambda: _tokens(
        "OPTForCausalLM", "OPTConfig", 8, 512, hidden_size=768, ffn_dim=3072, num_hidden_layers=8,
        num_attention_heads=12, vocab_size=32000, word_embed_proj_dim=768,
    ),
    "qwen3-bf16": lambda: _tokens(
        "Qwen3ForCausalLM", "Qwen3Config", 4, 1024, True, num_key_value_heads=4, head_dim=64,
        **_SMALL,
    ),
    "gemma2-bf16": lambda: _tokens(
        "Gemma2ForCausalLM", "Gemma2Config", 4, 512, True, num_key_value_heads=4, head_dim=64,
        **_SMALL,
    ),
    "mistral": lambda: _tokens(
        "MistralForCausalLM", "MistralConfig", 4, 512, num_key_value_heads=4, **_SMALL
    ),
    "llama-checkpointing-bf16": lambda: _tokens(
        "LlamaForCausalLM", "LlamaConfig", 8, 1024, True, True, num_key_value_heads=12, **_SMALL
    ),
    "bart": lambda: _tokens(
        "BartForConditionalGeneration", "BartConfig", 8, 256, d_model=512, encoder_layers=4,
        decoder_layers=4, encoder_ffn_dim=2048, decoder_ffn_dim=2048, encoder_attention_heads=8,
        decoder_attention_heads=8, vocab_size=32000,
    ),
}  # fmt: skip


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of measured bytes with the predictions and their errors in percent."""
    from lightning_unitscale.profiler import profile_graph  # after torchvision, which it looks for

    model, args, kwargs = MODELS[row["model"]]()
    profile = profile_graph(model, *args, device="cuda:h100", optimizer=torch.optim.AdamW, **kwargs)
    assert profile.allocator is not None
    predicted, reserved = profile.peak_bytes, profile.allocator.reserved_bytes
    measured = row["allocated bytes"] - row["left before"]
    return {
        **row,
        "predicted": predicted,
        "error %": round(100 * (predicted / measured - 1), 2),
        "predicted reserved": reserved,
        "reserved error %": round(100 * (reserved / row["reserved bytes"] - 1), 2),
        "peak at": profile.peak.operator,
    }


def _summary(rows: list[dict[str, Any]], name: str) -> str:
    errors = [abs(row[name]) for row in rows]
    return f"{name}: median {statistics.median(errors):.2f}, worst {max(errors):.2f}"


def main() -> None:
    """Predict the models, print the table, and write the errors beside the measured bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of models, by default all")
    names = parser.parse_args().models or list(MODELS)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    _torchvision()
    data = json.loads(PATH.read_text())
    rows = {row["model"]: row for row in data["rows"]}
    for name in names:
        rows[name] = compare(rows[name])
        print(f"{name:26} {rows[name]['error %']:+6.2f} %", flush=True)
    done = [row for row in rows.values() if "error %" in row]
    data["rows"] = list(rows.values())
    data["predicted with"] = {"torch": torch.__version__}
    data["summary"] = [_summary(done, name) for name in ("error %", "reserved error %")]
    PATH.write_text(json.dumps(data, indent=1) + "\n")
    table = [
        {
            "model": row["model"],
            "measured MiB": round((row["allocated bytes"] - row["left before"]) / MIB, 1),
            "predicted MiB": round(row["predicted"] / MIB, 1),
            "error %": row["error %"],
            "reserved MiB": round(row["reserved bytes"] / MIB),
            "predicted reserved MiB": round(row["predicted reserved"] / MIB),
            "reserved error %": row["reserved error %"],
        }
        for row in done
    ]
    print(tabulate(table, headers="keys", tablefmt="github"), *data["summary"], sep="\n")


if __name__ == "__main__":
    main()
