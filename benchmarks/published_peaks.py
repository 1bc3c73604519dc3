"""Published peaks of fine-tuning runs, and their predictions by the profiler.

    python benchmarks/published_peaks.py             # all rows
    python benchmarks/published_peaks.py phi-2 lora  # rows whose name contains one of the words

Every row has its source and settings, which were written down before the first prediction. Models
are on ``meta``. The packages that build them are installed for this script alone:

    pip install --no-deps --target DIR litgpt==0.4.4 peft==0.21.2 transformers==5.13.1 \\
        'huggingface_hub<2' 'tokenizers<=0.23' accelerate
    PYTHONPATH=DIR:. python benchmarks/published_peaks.py

- litgpt: ``config_hub/finetune/README.md``, column "Peak memory": ``max_memory_allocated`` in
  10^9 bytes. BF16 parameters, AdamW, Alpaca2k (padded to the longest of a batch, at most 512
  tokens), A10G. The ranks of LoRA are those of the row's YAML file. litgpt 0.4.4 (July 2024) is as
  old as the table. Its QLoRA has bitsandbytes' NF4 layers and paged AdamW, simulated here.
- PEFT: ``method_comparison/MetaMathQA/results/*.json``, ``accelerator_memory_max``: the most bytes
  reserved after a step. Llama 3.2 3B in BF16, adapters in FP32, batch 4, AdamW, L40S, torch 2.13,
  transformers 5.13.1. The lengths of batches are not published. The row of LoRA with rank 32 gives
  the longest one, and all other rows are predicted with it.
- torchtitan: ``benchmarks/llama3_h100_202412_torchtitan.md``, the rows without ``torch.compile``:
  Llama 3.1 8B on H100, two sequences of 8192 tokens on each, FSDP2 with BF16 parameters and FP32
  gradients, "op" checkpoints, AdamW. ``max_reserved_gib`` of ``torchtitan/metrics.py``. Its model
  of that commit needs Triton: ``pip install --no-deps --target DIR triton==3.5.0``, and a checkout
  of torchtitan at 9dec370 in ``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from measure import RESULTS
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_unitscale.profiler import GraphProfile, fake_process_group, profile_graph

PATH = RESULTS / "published_peaks.json"
_LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main/config_hub/finetune/README.md"
_TITAN = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
_PEFT = "https://github.com/huggingface/peft/tree/main/method_comparison/MetaMathQA/results"
_ATTENTION = {"lora_query": True, "lora_value": True}
_EVERY = {f"lora_{part}": True for part in ("query", "key", "value", "projection", "mlp", "head")}
_LLAMA = {
    "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
    "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "high_freq_factor": 4.0,
        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published peak, and the settings that it was measured with.

    Attributes:
        source: ``"litgpt"``, ``"PEFT"`` or ``"torchtitan"``.
        name: Its name in the source.
        value: Published bytes.
        batch: Sequences in a batch.
        model: Name of the model in litgpt.
        options: Ranks and places of LoRA, PEFT's configuration, or torchtitan's number of GPUs.
        flag: Why the value cannot be that of the settings, if so.
    """

    source: str
    name: str
    value: float
    batch: int
    model: str = "Llama-3.2-3B"
    options: dict[str, Any] = field(default_factory=dict)
    flag: str = ""

    @property
    def is_quantized(self) -> bool:
        """Check whether frozen weights are in NF4, as in QLoRA."""
        return self.name.endswith("/qlora")


def _litgpt(
    name: str, model: str, gigabytes: float, batch: int, *, flag: str = "", **lora: Any
) -> Row:
    return Row("litgpt", name, gigabytes * 1e9, batch, model, lora, flag)


def _peft(name: str, value: int, kind: str = "", **options: Any) -> Row:
    return Row("PEFT", name, value, 4, options={"kind": kind, **options} if kind else {})


_R32 = {"lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05}
_R16 = {"lora_r": 16, "lora_alpha": 16, "lora_dropout": 0.1}
_R8 = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05}
_SHARDED = "FSDP shards the state: 4 GPUs in the table, {} in the YAML file"
ROWS = (
    _litgpt("falcon-7b/lora", "falcon-7b", 16.69, 1, **_R32, **_ATTENTION),
    _litgpt("gemma-2b/lora", "Gemma-2b", 12.62, 2, **{**_R8, "lora_dropout": 0.1}, **_EVERY),
    _litgpt("llama-2-7b/lora", "Llama-2-7b-hf", 19.77, 2, **_R32, **_ATTENTION),
    _litgpt("llama-3-8b/lora", "Llama-3-8B", 19.73, 1, **_R32, **_ATTENTION),
    _litgpt("llama-3.1-8b/lora", "Llama-3-8B", 19.73, 1, **_R32, **_ATTENTION),
    _litgpt("mistral-7b/lora", "Mistral-7B-v0.1", 20.66, 2, **_R32, **_ATTENTION),
    _litgpt("mistral-7b-v0.2/lora", "Mistral-7B-Instruct-v0.2", 20.66, 2, **_R32, **_ATTENTION),
    _litgpt("phi-2/lora", "phi-2", 13.98, 4, **_R8, **_EVERY),
    _litgpt("phi-3/lora", "Phi-3-mini-4k-instruct", 19.75, 4, **_R8, **_EVERY),
    _litgpt("stablelm-3b/lora", "stablelm-base-alpha-3b", 8.58, 1, **_R32, **_ATTENTION),
    _litgpt("tiny-llama/lora", "tiny-llama-1.1b", 13.50, 8, **_R32, **_EVERY),
    _litgpt("tiny-llama/full", "tiny-llama-1.1b", 14.10, 4),
    _litgpt("stablelm-3b/qlora", "stablelm-base-alpha-3b", 5.24, 1, **_R32, **_ATTENTION),
    _litgpt("falcon-7b/qlora", "falcon-7b", 9.44, 1, **_R32, **_ATTENTION),
    _litgpt("gemma-2b/qlora", "Gemma-2b", 11.58, 2, **_R16, **_EVERY),
    _litgpt("gemma-7b/qlora", "Gemma-7b", 17.18, 1, **_R16, **_EVERY),
    _litgpt("llama-2-7b/qlora", "Llama-2-7b-hf", 13.68, 2, **_R32, **_ATTENTION),
    _litgpt("llama-3-8b/qlora", "Llama-3-8B", 17.41, 2, **_R32, **_ATTENTION),
    _litgpt("mistral-7b/qlora", "Mistral-7B-v0.1", 14.29, 2, **_R32, **_ATTENTION),
    _litgpt("phi-2/qlora", "phi-2", 14.27, 4, **_R8, **_EVERY),
    _litgpt("phi-3/qlora", "Phi-3-mini-4k-instruct", 19.13, 4, **_R8, **_EVERY),
    _litgpt("tiny-llama/qlora", "tiny-llama-1.1b", 16.24, 8, **_R32, **_EVERY),
    _litgpt("phi-3/full", "Phi-3-mini-4k-instruct", 17.01, 4, flag="8 bytes a parameter are 30.6"),
    _litgpt("gemma-2b/full", "Gemma-2b", 17.43, 1, flag=_SHARDED.format(4)),
    _litgpt("phi-2/full", "phi-2", 14.44, 4, flag=_SHARDED.format(2)),
    _litgpt("stablelm-3b/full", "stablelm-base-alpha-3b", 21.23, 1, flag=_SHARDED.format(2)),
    _peft("lora-rank64", 22552772608, "LoraConfig", r=64, lora_alpha=128),
    _peft("full-finetuning", 38868615168),
    _peft("lora-rank32-dora", 24532484096, "LoraConfig", r=32, lora_alpha=64, use_dora=True),
    _peft(
        "lora-rank10-target-mlp", 24698159104, "LoraConfig", r=10, lora_alpha=20,
        target_modules=["gate_proj", "up_proj", "down_proj"],
    ),
    _peft("ln_tuning", 21181235200, "LNTuningConfig"),
    _peft("ia3-default", 23234347008, "IA3Config"),
    _peft(
        "ia3-all-attn", 26145193984, "IA3Config",
        target_modules=[f"{part}_proj" for part in ("q", "k", "v", "o", "down", "gate", "up")],
        feedforward_modules=["down_proj", "gate_proj", "up_proj"],
    ),
    _peft("vera-default", 21621637120, "VeraConfig", r=256),
    _peft(
        "loha-rank32", 23907532800, "LoHaConfig", r=32, alpha=64,
        target_modules=["q_proj", "v_proj"],
    ),
    _peft(
        "lokr-rank32-factor4", 23590862848, "LoKrConfig", r=32, alpha=64, decompose_factor=4,
        target_modules=["q_proj", "v_proj"],
    ),
    _peft("prompt_tuning-default", 24394072064, "PromptTuningConfig", num_virtual_tokens=200),
    Row("torchtitan", "llama-3.1-8b/8-gpus", 82.4 * 2**30, 2, "8B", {"ranks": 8}),
    Row("torchtitan", "llama-3.1-8b/128-gpus", 67.0 * 2**30, 2, "8B", {"ranks": 128}),
)  # fmt: skip
CALIBRATION = _peft("lora-rank32", 22292725760, "LoraConfig", r=32, lora_alpha=64)
"""The row that gives the length of PEFT's longest batch."""


class _Litgpt(nn.Module):
    """A step of litgpt's fine-tuning, with its chunked loss and, for LoRA, its chunked head."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        lora = importlib.import_module("litgpt.lora")
        plain = importlib.import_module("litgpt.model")
        self.loss = importlib.import_module("litgpt.utils").chunked_cross_entropy
        package = lora if row.options else plain
        config = package.Config.from_name(row.model, **row.options)
        with torch.device("meta"):
            self.model = package.GPT(config).to(torch.bfloat16)
            self.model.max_seq_length = 512
        self.is_lora, self.is_quantized = bool(row.options), row.is_quantized
        if row.options:
            lora.mark_only_lora_as_trainable(self.model)
            if row.is_quantized:
                _quantize(self.model)
        else:  # the gradients of earlier micro-batches
            for index, param in enumerate(self.model.parameters()):
                self.register_buffer(f"gradient_{index}", torch.empty_like(param))

    def forward(self, ids: Tensor) -> dict[str, Any]:
        if self.is_quantized:  # the loop still holds logits, and so the graph, of the last batch
            before = self._step(ids)
            before.pop("loss").backward()
        return self._step(ids)

    def _step(self, ids: Tensor) -> dict[str, Any]:
        # Fabric's "bf16-true" returns FP32 (HalfPrecision.convert_output).
        if not self.is_lora:
            whole = self.model(ids).float()
            return {"loss": self.loss(whole[..., :-1, :], ids[..., 1:]), "logits": whole}
        logits = [chunk.float() for chunk in self.model(ids, lm_head_chunk_size=128)]
        logits[-1] = logits[-1][..., :-1, :]
        # The loop of litgpt holds the logits in a variable until the next step.
        return {"loss": self.loss(logits, ids[..., 1:]), "logits": logits}


class _Dequantized(torch.autograd.Function):
    """A matmul with NF4 weights, which are made whole in FP16 and cast, in both passes.

    References:
        bitsandbytes 0.42.0, ``autograd/_functions.py``, ``MatMul4Bit``: it keeps its input too, as
        an attribute. Fabric quantizes FP16 weights (``plugins/precision/bitsandbytes.py``).
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, packed: Tensor, scales: Tensor, shape: Any) -> Tensor:
        ctx.tensors, ctx.shape = (given, packed), shape
        return F.linear(given, packed.new_empty(shape, dtype=torch.half).to(given.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, packed = ctx.tensors
        weight = packed.new_empty(ctx.shape, dtype=torch.half).to(grads[0].dtype)
        return grads[0] @ weight, None, None, None


class _Nf4Linear(nn.Module):
    """A frozen linear layer with two weights in a byte, and a scale in FP32 for 64 of them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        count, self.bias = linear.weight.numel(), linear.bias
        self.shape = linear.weight.shape
        self.in_features, self.out_features = linear.in_features, linear.out_features
        with torch.device("meta"):
            self.register_buffer("weight", torch.empty(count // 2, 1, dtype=torch.uint8))
            self.register_buffer("scales", torch.empty(count // 64))

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = _Dequantized.apply(given, self.weight, self.scales, self.shape)
        return result if self.bias is None else result + self.bias


def _quantize(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, _Nf4Linear(child))
        else:
            _quantize(child)


class _PagedAdamW(torch.optim.AdamW):
    """AdamW whose states in FP32 are in pages that torch's allocator does not count.

    References:
        bitsandbytes, ``optim/optimizer.py``, ``get_state_buffer``: those of 100,000 elements or
        more.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None and not self.state[param] and param.numel() < 100_000:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[param][name] = torch.zeros_like(param, dtype=torch.float32)


def _profile_litgpt(row: Row) -> GraphProfile:
    ids = torch.empty(row.batch, 512, dtype=torch.long, device="meta")
    optimizer = _PagedAdamW if row.is_quantized else torch.optim.AdamW
    return profile_graph(_Litgpt(row), ids, device="cuda:a10g", optimizer=optimizer)


def _profile_peft(row: Row, length: int) -> GraphProfile:
    transformers, peft = map(importlib.import_module, ("transformers", "peft"))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA)).bfloat16()
        if row.options:
            kind = getattr(peft, row.options["kind"])
            options = {name: value for name, value in row.options.items() if name != "kind"}
            if row.options["kind"] not in ("LoHaConfig", "LoKrConfig"):
                options["task_type"] = "CAUSAL_LM"
            model = peft.get_peft_model(model, kind(**options))
    ids = torch.empty(row.batch, length, dtype=torch.long, device="meta")
    return profile_graph(
        model.train(), input_ids=ids, attention_mask=ids, labels=ids,
        num_items_in_batch=row.batch * length, device="cuda:l40s", optimizer=torch.optim.AdamW,
    )  # fmt: skip


class _Titan(nn.Module):
    """torchtitan's step, with its checkpoints and shards."""

    def __init__(self, ranks: int, length: int) -> None:
        super().__init__()
        titan = importlib.import_module("torchtitan.models.llama")
        parallel = importlib.import_module("torchtitan.parallelisms.parallelize_llama")
        config = replace(titan.llama3_configs["8B"], vocab_size=128256, max_seq_len=length)
        with torch.device("meta"):
            self.model = titan.Transformer(config)
        parallel.apply_ac(self.model, Namespace(mode="selective", selective_ac_option="op"))
        mesh = init_device_mesh("cuda", (ranks,))
        parallel.apply_fsdp(self.model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(0, 1))
        del logits  # as torchtitan's loop does before the backward pass
        return loss


def _profile_titan(row: Row, length: int = 8192) -> GraphProfile:
    ids = torch.empty(row.batch, length, dtype=torch.long, device="meta")
    with fake_process_group(row.options["ranks"], device="cuda"):
        step = _Titan(row.options["ranks"], length)
        return profile_graph(step, ids, device="cuda:h100", optimizer=torch.optim.AdamW)


def _reserved(profile: GraphProfile) -> int:
    assert profile.allocator is not None
    return profile.allocator.reserved_bytes


def longest_batch() -> int:
    """Return the length at which the prediction for :data:`CALIBRATION` is the published value."""
    lengths = (512, 640)
    low, high = (_reserved(_profile_peft(CALIBRATION, length)) for length in lengths)
    step = (lengths[1] - lengths[0]) / (high - low)
    return round(lengths[0] + (CALIBRATION.value - low) * step)


def predict(row: Row, length: Callable[[], int]) -> dict[str, Any]:
    """Return a row with its prediction, and the error in percent."""
    began = time.perf_counter()
    if row.source == "litgpt":
        profile = _profile_litgpt(row)
        predicted = profile.peak_bytes
    else:
        is_peft = row.source == "PEFT"
        profile = _profile_peft(row, length()) if is_peft else _profile_titan(row)
        predicted = _reserved(profile)
    return {
        **asdict(row),
        "address": {"PEFT": _PEFT, "torchtitan": _TITAN, "litgpt": _LITGPT}[row.source],
        "predicted": predicted,
        "error %": round(100 * (predicted / row.value - 1), 2),
        "peak at": f"{profile.peak.phase} {profile.peak.operator}",
        "by kind": profile.peak.by_kind,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Predict rows one after the other, write each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of names of rows, by default all rows")
    words = parser.parse_args().words
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    data = json.loads(PATH.read_text()) if PATH.exists() else {"rows": []}
    done = {(row["source"], row["name"]): row for row in data["rows"]}

    def length() -> int:
        if "longest batch of PEFT" not in data:
            data["longest batch of PEFT"] = longest_batch()
        return int(data["longest batch of PEFT"])

    for row in ROWS:
        if words and not any(word in row.name for word in words):
            continue
        result = predict(row, length)
        done[row.source, row.name] = result
        data["rows"] = list(done.values())
        print(f"{row.source:7} {row.name:24} {result['error %']:+7.2f} %", flush=True)
        PATH.write_text(json.dumps(data, indent=1) + "\n")
    counted = [abs(row["error %"]) for row in data["rows"] if not row["flag"]]
    data["predicted with"] = {"torch": torch.__version__}
    data["summary"] = (
        f"median {statistics.median(counted):.2f} %, worst {max(counted):.2f} %, "
        f"{len(counted)} rows without a flag"
    )
    PATH.write_text(json.dumps(data, indent=1) + "\n")
    table = [
        {
            "source": row["source"],
            "row": row["name"],
            "batch": row["batch"],
            "published GB": round(row["value"] / 1e9, 2),
            "predicted GB": round(row["predicted"] / 1e9, 2),
            "error %": row["error %"],
            "flag": row["flag"],
        }
        for row in data["rows"]
    ]
    print(tabulate(table, headers="keys", tablefmt="github"), data["summary"], sep="\n")


if __name__ == "__main__":
    main()
