"""Architectures of Hugging Face as people train them: `return self.net(**batch).loss` in a Trainer.

Each architecture of ``model_zoo.py`` trains for three steps of SGD, plain, plain once more and with
``RematCallback("min_cut")``, each in a process of its own. Losses and weights are compared with the
plain run's. Beside the number of graphs that the callback's step is captured in is the number that
``torch.compile`` makes of the same call of the bare model.

    python benchmarks/architecture_steps.py                # all of them, and a JSON file
    python benchmarks/architecture_steps.py GPT-2 T5       # some anew, the others from that file
    python benchmarks/architecture_steps.py --markdown     # as docs/measurements/architectures.md
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.utilities.types import STEP_OUTPUT
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.architectures import equal_bits, loss_of, seed_everything
from benchmarks.measure import RESULTS, machine, versions_of
from benchmarks.model_zoo import ZOO
from benchmarks.real.apart import Failure, apart
from lightning_unitscale import RematCallback
from lightning_unitscale.capture.module_steps import steps_of

NUM_STEPS = 3
RUN_SECONDS = 600.0


class Trained(pl.LightningModule):
    """A model and its one batch, as a LightningModule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        return loss_of(self.net(**batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Seen(pl.Callback):
    """Notes each loss, how long the first step took, and how many graphs the last one had."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.first_step_seconds = 0.0
        self.num_graphs: int | None = None
        self.breaks: list[str] = []
        self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert isinstance(outputs, Mapping)
        self.losses.append(outputs["loss"].detach().clone())
        steps = steps_of(pl_module)
        if batch_idx == 0:
            self.first_step_seconds = time.perf_counter() - self._start
        if steps is not None:
            # Of the last step: what broke in the first one alone is captured once more.
            self.num_graphs = steps.steps["training_step"].num_graph_calls
            self.breaks = list(dict.fromkeys(map(_without_folders, steps.graph_breaks)))


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    num_graphs: int | None
    first_step_seconds: float
    breaks: list[str]
    warnings: list[str]


@dataclass
class Result:
    """One architecture; ``error`` is set when it did not train under the callback."""

    architecture: str
    num_graphs: int | None = None
    num_torch_graphs: int | None = None  # 0: it fails
    is_torch_whole: bool = False
    repeats_itself: bool = True
    losses: float = 0.0
    weights: float = 0.0
    first_step_seconds: float = 0.0
    breaks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str = ""


def train(name: str, budget: str | None) -> Run:
    """Train one architecture, with ``RematCallback`` if there is a budget."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seed_everything()
        net, batch = ZOO[name]()
        module, seen = Trained(net), Seen()
        seed_everything()
        callbacks: list[pl.Callback] = [seen]
        if budget is not None:
            callbacks.append(RematCallback(budget))
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=NUM_STEPS,
            max_epochs=-1,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader([batch] * NUM_STEPS, batch_size=None))
    said = {f"{one.message}" for one in caught if "RematCallback" in str(one.message)}
    return Run(
        seen.losses,
        dict(module.state_dict()),
        seen.num_graphs,
        seen.first_step_seconds,
        seen.breaks,
        sorted(map(_without_folders, said)),
    )


def torch_graphs(name: str) -> tuple[int, bool]:
    """How many graphs ``torch.compile`` makes of a call, and whether it makes one if it has to."""
    warnings.filterwarnings("ignore")

    def count(*, fullgraph: bool) -> int:
        num_graphs = 0

        def backend(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            nonlocal num_graphs
            num_graphs += 1
            return graph.forward

        torch._dynamo.reset()
        seed_everything()
        net, batch = ZOO[name]()
        torch.compile(lambda: loss_of(net(**batch)), backend=backend, fullgraph=fullgraph)()
        return num_graphs

    try:
        is_whole = count(fullgraph=True) == 1
    except Exception:
        is_whole = False
    try:
        return count(fullgraph=False), is_whole
    except Exception:
        return 0, is_whole


def examine(name: str) -> Result:
    """Compare the callback's run with the plain one."""
    plain = apart("fork", RUN_SECONDS, train, name, None)
    if isinstance(plain, Failure):
        return Result(name, error=f"plain: {_without_folders(plain.text)}")
    again = apart("fork", RUN_SECONDS, train, name, None)
    ours = apart("fork", RUN_SECONDS, train, name, "min_cut")
    of_torch = apart("fork", RUN_SECONDS, torch_graphs, name)
    result = Result(name, repeats_itself=differences(plain, again) == (0.0, 0.0))
    if not isinstance(of_torch, Failure):
        result.num_torch_graphs, result.is_torch_whole = of_torch
    if isinstance(ours, Failure):
        result.error = _without_folders(ours.text)
        return result
    result.losses, result.weights = differences(plain, ours)
    result.num_graphs, result.breaks = ours.num_graphs, ours.breaks
    result.first_step_seconds, result.warnings = ours.first_step_seconds, ours.warnings
    return result


def differences(plain: Run, other: Run) -> tuple[float, float]:
    """Return the largest relative difference of a loss, and the largest of a weight."""
    losses = (
        _difference(one, another) / abs(float(one))
        for one, another in zip(plain.losses, other.losses, strict=True)
    )
    weights = (_difference(value, other.weights[name]) for name, value in plain.weights.items())
    return max(losses), max(weights)


def _difference(expected: Tensor, found: Tensor) -> float:
    if equal_bits(expected, found):
        return 0.0
    return float((expected.double() - found.double()).abs().max())


def _without_folders(text: str) -> str:
    """Return the first line of a text without the folders of this machine."""
    return re.sub(r"/\S*/(site-packages|benchmarks|python3\.\d+)/", "", text.splitlines()[0])


def _quiet() -> None:
    # For the processes that are forked from this one as well.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def table(results: Sequence[Result], style: str) -> str:
    """One row per architecture."""
    rows = [
        {
            "architecture": one.architecture,
            "graphs": one.num_graphs or "-",
            "torch.compile": one.num_torch_graphs or "fails",
            "losses": "run ends" if one.error else _shown(one.losses),
            "weights": "" if one.error else _shown(one.weights),
        }
        for one in results
    ]
    return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True)


def _shown(difference: float) -> str:
    return "same" if difference == 0.0 else f"{difference:.0e}"


def summary(results: Sequence[Result]) -> str:
    """What holds of all of them."""
    ran = [one for one in results if not one.error]
    as_torch = [one for one in ran if (one.num_graphs or 0) <= (one.num_torch_graphs or 0)]
    lines = [
        f"{len(ran)} of {len(results)} train under RematCallback",
        f"captured whole: {sum(one.num_graphs == 1 for one in ran)}, by torch.compile "
        f"{sum(one.num_torch_graphs == 1 for one in results)}, with fullgraph=True "
        f"{sum(one.is_torch_whole for one in results)}",
        f"in no more graphs than torch.compile makes: {len(as_torch)}",
        f"losses equal: {sum(one.losses == 0.0 for one in ran)}, weights equal: "
        f"{sum(one.weights == 0.0 for one in ran)}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "architecture_steps.json")
    parser.add_argument("--markdown", action="store_true", help="a table for the docs")
    arguments = parser.parse_args()
    _quiet()
    known: dict[str, Result] = {}
    if arguments.names and arguments.output.exists():
        found = json.loads(arguments.output.read_text())["results"]
        known = {one["architecture"]: Result(**one) for one in found}
    for name in arguments.names or list(ZOO):
        one = known[name] = examine(name)
        print(table([one], "plain").splitlines()[-1], flush=True)
        for line in filter(None, [one.error, *one.breaks]):
            print(f"   {line[:300]}", flush=True)
        about = {**machine(), **versions_of(["transformers"])}
        results = [known[each] for each in ZOO if each in known]
        document = {**about, "results": [asdict(each) for each in results]}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results, "github" if arguments.markdown else "simple"))
    print(summary(results))


if __name__ == "__main__":
    main()
