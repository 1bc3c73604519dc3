"""Peaks with saved tensors in host memory, and with the same recomputation without offload.

    python benchmarks/offload.py             # five models, on an A100, 25 GB/s to the host
    python benchmarks/offload.py GPT         # some

Part one needs no GPU. The step of each model, at a size that trains on one GPU, is traced on fake
tensors in BF16 and planned to 60 GiB without moving anything. That plan's recomputation is then
kept. Of the choices of moves the one with the lowest peak is taken whose copies computing waits for
at most 5 % of the step. Times are those of the GPU's data sheet, which no real step reaches, so in
reality copies have more time. Bytes in host memory are counted apart. The last column is the time
that recomputation alone takes to reach the same peak, if it can.

Part two runs a small version of each model on this CPU: plain, and with the budgets 0.0 and 0.5 and
``offload="host"``. Losses and gradients have to have the same bits, and the peak of the allocator's
events the predicted bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from benchmarks.measure import RESULTS, machine
from lightning_unitscale.memory.gpus import GPUS
from lightning_unitscale.memory.offload import gpu_cost_model, offloads, start_times
from lightning_unitscale.memory.real_memory import PeakMeter
from lightning_unitscale.memory.traced_planner import traced_problem
from lightning_unitscale.remat import HostLink, Planner, RematPartitioner, RematPlan, aot_backend
from tests.helpers import same_bits

FILE = RESULTS / "offload.json"
LINK = HostLink(25e9)
MOST_EXPOSED = 0.05
BUDGET = "60GiB"
MIB, GIB = 2**20, 2**30


class Step(nn.Module):
    """A model and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


@dataclass(frozen=True)
class Subject:
    """A model, its batch, and the sizes of both versions."""

    make: Callable[..., nn.Module]
    batch: Callable[..., dict[str, Tensor]]
    large: dict[str, int]
    small: dict[str, int]
    gpu: str = "a100"


def _tokens(batch: int, length: int, **_: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 250, (batch, length))
    return {"input_ids": ids, "labels": ids}


def _images(batch: int, image: int, **_: int) -> dict[str, Tensor]:
    images = torch.rand(batch, 3, image, image)
    return {"pixel_values": images, "labels": torch.zeros(batch, dtype=torch.long)}


def _gpt(width: int, depth: int, length: int, **_: int) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=8192, n_positions=length, n_embd=width, n_layer=depth, n_head=width // 64,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # without it a warning breaks the graph
    return model


def _llama(width: int, depth: int, length: int, **_: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=depth,
        num_attention_heads=width // 64, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert(width: int, depth: int, length: int, **_: int) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth,
        num_attention_heads=width // 64, max_position_embeddings=length,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _vit(width: int, depth: int, image: int, **_: int) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth,
        num_attention_heads=width // 64, image_size=image, patch_size=16, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


class _Mixer(nn.Module):
    """Residual MLP blocks on vectors, such as embeddings of a table's rows."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        loss = nn.functional.cross_entropy(self.head(inputs).float(), labels)
        return ImageClassifierOutput(loss=loss)


def _rows(batch: int, width: int, **_: int) -> dict[str, Tensor]:
    return {"inputs": torch.randn(batch, width), "labels": torch.zeros(batch, dtype=torch.long)}


_SMALL = {"width": 128, "depth": 4, "batch": 4, "length": 64}
SUBJECTS = {
    "GPT": Subject(
        _gpt, _tokens, {"width": 2048, "depth": 24, "batch": 64, "length": 2048}, _SMALL
    ),
    "Llama": Subject(
        _llama, _tokens, {"width": 2048, "depth": 24, "batch": 32, "length": 2048}, _SMALL
    ),
    "BERT": Subject(
        _bert, _tokens, {"width": 2048, "depth": 24, "batch": 256, "length": 512}, _SMALL
    ),
    "ViT": Subject(
        _vit, _images, {"width": 1664, "depth": 48, "batch": 512, "image": 224},
        {"width": 128, "depth": 4, "batch": 64, "image": 64},
    ),
    "residual MLP": Subject(
        lambda width, depth, **_: _Mixer(width, depth), _rows,
        {"width": 2048, "depth": 48, "batch": 131072}, {"width": 128, "depth": 4, "batch": 512},
    ),
}  # fmt: skip


def planned(name: str) -> dict[str, Any]:
    """Plan the large version for the subject's GPU."""
    subject = SUBJECTS[name]
    gpu = GPUS[subject.gpu]
    with torch.device("meta"):
        step = Step(subject.make(**subject.large)).bfloat16()
        inputs = subject.batch(**subject.large)
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    model = gpu_cost_model(gpu)
    problem = traced_problem(step, inputs, device=f"cuda:{gpu.name}", cost_model=model)
    params = sum(param.numel() * param.element_size() for param in step.parameters())
    planner = Planner(problem, resident_bytes=2 * params, forward_bytes=params)  # Adam
    plan = planner.plan(BUDGET)
    seconds = start_times(problem, plan.timeline)[-1]
    choices = offloads(problem, plan.saved, plan.order, plan.timeline, LINK)
    hidden = [choice for choice in choices if choice.exposed_seconds <= MOST_EXPOSED * seconds]
    best = min(hidden, key=lambda choice: choice.timeline.peak_bytes)
    moved = replace(plan, timeline=best.timeline, moves=best.moves)
    recomputed = (
        planner.plan(moved.peak_bytes) if planner.floor.peak_bytes <= moved.peak_bytes else None
    )
    return {
        "model": name,
        "parameters, M": round(params / 2e6),
        "GPU": gpu.title,
        "without, GiB": round(planner.default.peak_bytes / GIB, 2),
        "60 GiB plan, GiB": round(plan.peak_bytes / GIB, 2),
        "with offload, GiB": round(moved.peak_bytes / GIB, 2),
        "lower, %": round(100 * (1 - moved.peak_bytes / plan.peak_bytes), 1),
        "on the host, GiB": round(moved.host_bytes / GIB, 2),
        "step, s": round(seconds, 3),
        "recomputed, s": round(plan.again_seconds, 3),
        "exposed, %": round(100 * best.exposed_seconds / seconds, 2),
        "without offload, s": None if recomputed is None else round(recomputed.seconds, 3),
    }


def executed(name: str) -> list[dict[str, Any]]:
    """Run the small version on this CPU, plain and with moves."""
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    step, inputs = Step(subject.make(**subject.small)), subject.batch(**subject.small)
    expected = _results(step, step, inputs)
    rows = []
    for budget in (0.0, 0.5):
        torch._dynamo.reset()
        plans: list[RematPlan] = []
        partitioner = RematPartitioner(budget, offload="host", on_plan=plans.append)
        run = torch.compile(lambda inputs: step(inputs), backend=aot_backend(partitioner))
        found = _results(step, run, inputs)
        meter = PeakMeter(torch.device("cpu"))
        step.zero_grad()
        meter.start()
        meter.mark([list(step.parameters()), list(step.buffers()), list(inputs.values())])
        run(inputs).backward()
        measured, plan = meter.stop(), plans[-1]
        assert measured is not None
        rows.append(
            {
                "model": name,
                "budget": budget,
                "moved": len(plan.moves),
                "on the host, MiB": round(plan.host_bytes / MIB, 3),
                "predicted, MiB": round(plan.peak_bytes / MIB, 3),
                "measured, MiB": round(measured / MIB, 3),
                "error, %": round(100 * (plan.peak_bytes / measured - 1), 3),
                "same bits": all(map(same_bits, found, expected)),
            }
        )
    return rows


def _results(step: nn.Module, run: Callable[..., Tensor], inputs: Any) -> list[Tensor]:
    step.zero_grad()
    loss = run(inputs)
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in step.parameters())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(SUBJECTS), help="all by default")
    parser.add_argument("--only", choices=("planned", "executed"), help="one part")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in arguments.models:
        row = known.setdefault("models", {}).setdefault(name, {})
        if arguments.only != "executed":
            row["planned"] = planned(name)
            print(tabulate([row["planned"]], headers="keys"), flush=True)
        if arguments.only != "planned":
            row["executed"] = executed(name)
            print(tabulate(row["executed"], headers="keys"), flush=True)
        known |= {"machine": machine(), "link, GB/s": LINK.bytes_per_second / 1e9}
        FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
