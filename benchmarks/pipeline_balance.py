"""Balance of the ranks of a pipeline, and its effect on the step time.

Planned, by the profiler's estimates and without running anything: what the slowest rank computes
over the mean of all, for balanced cuts and for equal numbers of layers. Beside it stand what the
largest operation allows, and the most equal of all cuts, found by exact search. Balanced cuts are
those of the shortest step, so the simulated steps are there too, under 1F1B with twice as many
microbatches as ranks, each over that of equal ranks that send nothing.

Measured, on two processes of one thread, cut so and between equal numbers of layers: seconds of a
step under 1F1B, and the seconds that each process computes in it. For the demo's GPT also what
``torch.distributed.pipelining.pipeline`` makes of it with the same equal layers.

    python benchmarks/pipeline_balance.py
    python benchmarks/pipeline_balance.py --models GPT-2 --rounds 3
    python benchmarks/pipeline_balance.py --planned
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
import transformers
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.measure import RESULTS, interleaved_medians, machine
from benchmarks.ranks import run_as_ranks
from examples.gpt import GPT
from lightning_unitscale.capture.graph_nodes import MODULE
from lightning_unitscale.pipeline import (
    SCHEDULES,
    Pipe,
    PipelineRunner,
    SplitPoint,
    balanced_split,
    pipeline,
)
from lightning_unitscale.pipeline.balance import note_costs
from lightning_unitscale.pipeline.cuts import insert_mark
from lightning_unitscale.pipeline.explain import PipelinePlan, plan_of

NUM_RANKS, MICROBATCHES = 2, 8
RESULT = "pipeline_balance.json"


@dataclass(frozen=True)
class Case:
    """A model with its loss, a microbatch, and its layers.

    Attributes:
        module: The model.
        kwargs: Arguments of one microbatch.
        layers: Paths of the layers, in order.
    """

    module: nn.Module
    kwargs: dict[str, Tensor]
    layers: list[str]


class _DemoGPT(nn.Module):
    """The demo with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(width=192, depth=8, num_heads=4, context=64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.gpt(input_ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _text(vocabulary: int) -> dict[str, Tensor]:
    return {name: torch.randint(3, vocabulary, (4, 64)) for name in ("input_ids", "labels")}


def _hugging_face(model: str, config: str, layers: list[str], **options: Any) -> Case:
    common = {
        "vocab_size": 8192,
        "hidden_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "intermediate_size": 768,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    made = getattr(transformers, config)(**{**common, **options})
    module = getattr(transformers, model)(made).train()
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return Case(module, _text(8192), layers)


_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {"d_model": 192, "d_kv": 48, "d_ff": 768, "num_layers": 4, "num_heads": 4,
       "decoder_start_token_id": 0, "dropout_rate": 0.0}  # fmt: skip
MODELS: dict[str, Callable[[], Case]] = {
    "demo GPT": lambda: Case(_DemoGPT(), _text(256), [f"gpt.blocks.{i}" for i in range(8)]),
    # Its output layer costs as much as three of its layers.
    "GPT-2": lambda: _hugging_face(
        "GPT2LMHeadModel", "GPT2Config", [f"transformer.h.{i}" for i in range(8)], **_QUIET
    ),
    "Llama": lambda: _hugging_face(
        "LlamaForCausalLM",
        "LlamaConfig",
        [f"model.layers.{i}" for i in range(8)],
        num_key_value_heads=2,
    ),
    "BERT": lambda: _hugging_face(
        "BertForMaskedLM",
        "BertConfig",
        [f"bert.encoder.layer.{i}" for i in range(8)],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "T5": lambda: _hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(4)],
        **_T5,
    ),
}


def equal_layers(case: Case, num_stages: int) -> dict[str, Any]:
    """Cuts between equal numbers of layers."""
    size = len(case.layers) // num_stages
    return {case.layers[i * size]: SplitPoint.BEGINNING for i in range(1, num_stages)}


def _plan(case: Case, pipe: Pipe) -> PipelinePlan:
    return plan_of(pipe, case.module, None)


def _rank_imbalance(plan: PipelinePlan, schedule: str, num_ranks: int) -> float:
    ranks = [0.0] * num_ranks
    for index, costs in enumerate(plan.stages):
        rank = SCHEDULES[schedule].rank_of(index, num_ranks)
        ranks[rank] += costs.forward_seconds + costs.backward_seconds
    return max(ranks) * num_ranks / sum(ranks)


def planned(names: list[str]) -> list[dict[str, Any]]:
    """Imbalance and steps by the profiler's costs: one stage per rank, and two in a V."""
    rows = []
    for name in names:
        case = MODELS[name]()
        for num_ranks in (2, 4, 8):
            single = _capture(case, {"split_policy": balanced_split(num_ranks)})
            schedule = SCHEDULES["ZBVZeroBubble"]
            policy = balanced_split(
                2 * num_ranks, rank_of=functools.partial(schedule.rank_of, num_ranks=num_ranks)
            )
            double = _capture(case, {"split_policy": policy})
            # Of all cuts the most equal: as if sending cost next to nothing.
            policy = balanced_split(num_ranks, bytes_per_second=1e15, num_microbatches=10**6)
            most_equal = _plan(case, _capture(case, {"split_policy": policy}))
            equal = None
            if len(case.layers) % num_ranks == 0:
                spec = equal_layers(case, num_ranks)
                equal = _plan(case, _capture(case, {"split_policy": _marked(spec, case)}))
            plan = _plan(case, single)
            owned = [sum(_size(param) for param in stage.parameters()) for stage in single.stages]
            whole = sum(_size(param) for param in case.module.parameters())
            rows.append(
                {
                    "model": name,
                    "ranks": num_ranks,
                    "largest operation": plan.least_imbalance,
                    "most equal": most_equal.imbalance,
                    "balanced": plan.imbalance,
                    "equal layers": equal and equal.imbalance,
                    "two stages each, V": _rank_imbalance(
                        _plan(case, double), "ZBVZeroBubble", num_ranks
                    ),
                    "step, most equal": _step(most_equal),
                    "step, balanced": _step(plan),
                    "step, equal layers": equal and _step(equal),
                    "largest part of the parameters": max(owned) / whole,
                }
            )
    return rows


def _step(plan: PipelinePlan) -> float:
    """The simulated step over that of equal stages that send nothing."""
    return plan.timeline.seconds / plan.ideal_seconds


def _capture(case: Case, cut: dict[str, Any]) -> Pipe:
    return pipeline(case.module, (), case.kwargs, **cut)


def _marked(spec: dict[str, Any], case: Case) -> Any:
    """A policy that cuts in front of the first operation of each named module.

    So that the profiler, which a policy calls, has seen the graph in the same way.
    """

    def policy(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        note_costs(graph_module)
        for path in spec:
            node = next(
                node
                for node in graph_module.graph.nodes
                if node.op not in {"placeholder", "get_attr"}
                and f"{node.meta.get(MODULE, '')}.".startswith(f"{path}.")
            )
            insert_mark(graph_module.graph, node)
        graph_module.recompile()
        return graph_module

    return policy


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def measured(name: str, rounds: int) -> list[dict[str, Any]]:
    """This rank's part of the measurement of one model; of use on the first rank."""
    torch.manual_seed(0)
    case = MODELS[name]()
    whole = {key: value.repeat(MICROBATCHES, 1) for key, value in case.kwargs.items()}
    steps: dict[str, Callable[[], object]] = {}
    for way, cut in (
        ("balanced", {"split_policy": balanced_split(NUM_RANKS)}),
        ("equal layers", {"split_spec": equal_layers(case, NUM_RANKS)}),
    ):
        runner = PipelineRunner(_capture(case, cut), "1F1B", num_microbatches=MICROBATCHES)
        steps[way] = lambda runner=runner: runner.step(**whole)
    if isinstance(case.module, _DemoGPT):
        steps["torch's pipeline, equal layers"] = _torch_step(case, case.module.gpt, whole)
    busy: dict[str, list[float]] = {way: [] for way in steps}

    def timed(way: str) -> Callable[[], object]:
        def run() -> None:
            start = time.process_time()
            steps[way]()
            busy[way].append(time.process_time() - start)
            dist.barrier()

        return run

    seconds = interleaved_medians({way: timed(way) for way in steps}, rounds=rounds, warmup=2)
    rows = []
    for way in steps:
        own = sorted(busy[way][2:])[rounds // 2]
        ranks: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(ranks, own)
        rows.append(
            {
                "model": name,
                "cut": way,
                "step ms": 1e3 * seconds[way],
                "computing ms": " ".join(f"{1e3 * seconds:.0f}" for seconds in ranks),
                "slowest over mean": max(ranks) * NUM_RANKS / sum(ranks),
            }
        )
    return rows


def _torch_step(case: Case, model: nn.Module, whole: dict[str, Tensor]) -> Callable[[], object]:
    """A step of torch's own pipeline, which has the loss in its schedule."""
    (cut,) = (path.removeprefix("gpt.") for path in equal_layers(case, NUM_RANKS))
    microbatch = case.kwargs["input_ids"]
    split = {cut: torch_pipelining.SplitPoint.BEGINNING}
    pipe = torch_pipelining.pipeline(model, (microbatch,), split_spec=split)
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = torch_pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    if dist.get_rank() == 0:
        return lambda: schedule.step(whole["input_ids"])
    return lambda: schedule.step(target=whole["labels"], losses=[])


def main() -> int:
    """Plan in one process, measure in two, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--planned", action="store_true", help="leave the measured table as it is")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.planned:
        before = json.loads((RESULTS / RESULT).read_text())
        _write(planned(options.models), before["measured"], before["machine"])
        return 0
    if "RANK" not in os.environ:
        return run_as_ranks(Path(__file__), NUM_RANKS, sys.argv[1:])
    dist.init_process_group("gloo")
    rows = [row for name in options.models for row in measured(name, options.rounds)]
    if dist.get_rank() == 0:
        _write(planned(options.models), rows, machine())
    dist.destroy_process_group()
    return 0


def _write(plans: list[dict[str, Any]], rows: list[dict[str, Any]], about: dict[str, str]) -> None:
    print(tabulate(plans, headers="keys", floatfmt=".3f"))
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    RESULTS.mkdir(exist_ok=True)
    content = {
        "title": __doc__.splitlines()[0],
        "machine": about,
        "planned": plans,
        "measured": rows,
    }
    (RESULTS / RESULT).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
