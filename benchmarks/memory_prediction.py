"""Predicted and measured peaks of a training step, and those of torch's own tracker.

    python benchmarks/memory_prediction.py            # all models, and the 7-billion-parameter one
    python benchmarks/memory_prediction.py GPT-6 ViT  # some

Measured is what the allocator did in the second step: the running sum of the memory events of
``torch.profiler`` on top of what was there before (parameters, buffers, optimizer state, inputs).
Predicted is ``profile_graph`` for the same step. Torch's own tool for it is
``torch.distributed._tools.MemTracker``, which watches a step that really runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import RESULTS, machine
from model_zoo import ZOO
from tabulate import tabulate
from torch import Tensor, nn

from lightning_unitscale.memory.costs import tensors_in
from lightning_unitscale.memory.real_memory import PeakMeter, storages_of
from lightning_unitscale.profiler import profile_graph

MIB = 2**20
# Ten published architectures with different traits, at the size of the zoo.
HUGGING_FACE = (
    "GPT-2", "Llama", "Mixtral", "Mamba", "BERT", "T5", "BART", "Whisper", "Gemma2", "Qwen3",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model in training mode, the keyword arguments of its forward, and its loss."""

    model: nn.Module
    inputs: dict[str, Any]
    loss: Callable[[Any], Tensor]


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1)


class _GPT(nn.Module):
    def __init__(self, depth: int, width: int, vocabulary: int = 2048, length: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(_Block(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def _gpt(depth: int, width: int, batch: int) -> Case:
    model = _GPT(depth, width)
    return Case(model, {"tokens": torch.randint(0, 2048, (batch, 128))}, lambda out: out)


def _llama() -> Case:
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.randint(0, 2048, (8, 128))
    return Case(hf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, _its_loss)


def _vit() -> Case:
    import transformers as hf

    config = hf.ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768,
        image_size=64, patch_size=8, hidden_dropout_prob=0.1, num_labels=100,
    )  # fmt: skip
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(0, 100, (16,))
    model = hf.ViTForImageClassification(config)
    return Case(model, {"pixel_values": images, "labels": labels}, _its_loss)


def _resnet() -> Case:
    import transformers as hf

    config = hf.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2],
        layer_type="basic", num_labels=100,
    )  # fmt: skip
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(0, 100, (16,))
    model = hf.ResNetForImageClassification(config)
    return Case(model, {"pixel_values": images, "labels": labels}, _its_loss)


def _zoo(name: str) -> Case:
    model, inputs = ZOO[name]()
    return Case(model, inputs, _its_loss)


def _its_loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


CASES: dict[str, Callable[[], Case]] = {
    "GPT-6": lambda: _gpt(6, 256, 8),
    "GPT-48": lambda: _gpt(48, 128, 8),
    "Llama-GQA": _llama,
    "ViT": _vit,
    "ResNet-18": _resnet,
    **{f"HF {name}": (lambda name=name: _zoo(name)) for name in HUGGING_FACE},
}


def train_step(case: Case, optimizer: torch.optim.Optimizer) -> None:
    output = case.model(**case.inputs)
    case.loss(output).backward()
    del output
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(case: Case) -> tuple[int, int]:
    """Peak of the second step and bytes that autograd saves in it, by the tools of torch."""
    model, optimizer = case.model, torch.optim.AdamW(case.model.parameters())
    torch.manual_seed(0)
    train_step(case, optimizer)
    gc.collect()
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    state = list(map(dict, optimizer.state.values()))
    meter.mark([list(model.parameters()), list(model.buffers()), case.inputs, state])
    train_step(case, optimizer)
    peak = meter.stop()
    assert peak is not None
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        case.loss(case.model(**case.inputs))
    storages = storages_of(kept)
    for storage in storages_of([*model.parameters(), *model.buffers()]):
        storages.pop(storage, None)
    return peak, sum(storages.values())


def track(case: Case) -> tuple[int | None, float]:
    """Peak by torch's MemTracker, and its seconds; ``None`` where it fails."""
    from torch.distributed._tools.mem_tracker import MemTracker

    optimizer = torch.optim.AdamW(case.model.parameters())
    train_step(case, optimizer)
    tracker = MemTracker()
    tensors = tensors_in(case.inputs)
    tracker.track_external(case.model, optimizer, *tensors)
    start = time.perf_counter()
    try:
        with tracker:
            train_step(case, optimizer)
    except Exception as error:
        print(f"MemTracker: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return None, 0.0
    snapshot = tracker.get_tracker_snapshot("peak")
    return sum(device["Total"] for device in snapshot.values()), time.perf_counter() - start


def examine(name: str) -> dict[str, Any]:
    case = CASES[name]()
    start = time.perf_counter()
    predicted = profile_graph(
        case.model, optimizer=torch.optim.AdamW, loss=case.loss, **case.inputs
    )
    seconds = time.perf_counter() - start
    measured, saved = measure(case)
    tracked, tracker_seconds = track(CASES[name]())
    return {
        "model": name,
        "measured MiB": round(measured / MIB, 3),
        "predicted MiB": round(predicted.peak_bytes / MIB, 3),
        "ratio": round(predicted.peak_bytes / measured, 5),
        "MemTracker ratio": None if tracked is None else round(tracked / measured, 5),
        "saved ratio": round(predicted.saved_bytes / saved, 5),
        "peak in": predicted.peak.phase,
        "nodes": len(predicted.nodes),
        "seconds": round(seconds, 2),
        "MemTracker s": round(tracker_seconds, 2),
    }


def most_resident_mib() -> int:
    """The most memory that this process has had (Linux; ``getrusage`` inherits the parent's)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def large(device: str) -> dict[str, Any]:
    """A Llama of 7 billion parameters, in a process of its own so that its memory can be seen."""
    import transformers as hf

    before = most_resident_mib()
    start = time.perf_counter()
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig()).to(torch.bfloat16)
        ids = torch.zeros(1, 2048, dtype=torch.long)
    predicted = profile_graph(
        model, input_ids=ids, labels=ids, device=device, optimizer=torch.optim.AdamW
    )
    seconds = time.perf_counter() - start
    return {
        "model": "Llama 7B, BF16, 1 x 2048 tokens, AdamW",
        "device": device,
        "parameters": sum(param.numel() for param in model.parameters()),
        "nodes": len(predicted.nodes),
        "seconds": round(seconds, 1),
        "process MiB before": before,
        "process MiB at most": most_resident_mib(),
        "predicted peak GiB": round(predicted.peak_bytes / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="models to run; all by default")
    parser.add_argument("--large", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.large:
        print(json.dumps(large(options.large)))
        return
    rows = []
    for name in options.models or CASES:
        rows.append(examine(name))
        print(tabulate([rows[-1]], headers="keys", disable_numparse=True), flush=True)
    print("\n" + tabulate(rows, headers="keys"))
    if options.models:
        return
    larges = []
    for device in ("cpu", "cuda"):
        command = [sys.executable, __file__, "--large", device]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        larges.append(json.loads(run.stdout.splitlines()[-1]))
    print("\n" + tabulate(larges, headers="keys"))
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    content = {"machine": about, "rows": rows, "large": larges}
    (RESULTS / "memory_prediction.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
