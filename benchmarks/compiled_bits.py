"""Is a compiled module bit-identical with and without unit scaling?

For architectures of ``model_zoo.py`` in training mode: ``model.compile()``, then three steps of SGD
in FP32. The plain model runs twice, since some do not repeat themselves; then one with
``UnitScaleCallback`` attached runs the same steps. Compared are losses and gradients of all three
steps, bit for bit, and for those that differ the largest difference in the first step, relative to
the largest element of its tensor. Three with rotary embeddings stand twice: loops over a part of a
head of 16 elements do not fill a vector, those over one of 64 do. Results are kept in the JSON
file row by row.

    python benchmarks/compiled_bits.py            # all of them, some 40 minutes on one core
    python benchmarks/compiled_bits.py ViT Llama  # some
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from tabulate import tabulate
from torch import Tensor

from benchmarks.measure import RESULTS, machine
from benchmarks.model_zoo import CORE, ZOO, Example
from lightning_unitscale import UnitScaleCallback, attach
from tests.helpers import same_bits

STEPS = 3
HEADS_OF_64 = ", heads of 64"
WIDER = tuple(name + HEADS_OF_64 for name in ("Llama", "Mistral", "Mixtral"))


def example(name: str) -> Example:
    """The model of a row, and its inputs."""
    model, inputs = ZOO[name.removesuffix(HEADS_OF_64)]()
    if name.endswith(HEADS_OF_64):
        config: Any = model.config
        config.update({"hidden_size": 64 * config.num_attention_heads, "head_dim": 64})
        torch.manual_seed(0)
        model = type(model)(config)
    return model.train(), inputs


def train(name: str, callback: UnitScaleCallback | None = None) -> list[Tensor]:
    """Loss and gradients of each step."""
    torch._dynamo.reset()
    model, inputs = example(name)
    model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    numbers: list[Tensor] = []
    with attach(model, optimizer, callbacks=[] if callback is None else [callback]):
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss = model(**inputs)["loss"]
            loss.backward()
            gradients = (param.grad for param in model.parameters())
            numbers += [loss.detach(), *(grad.clone() for grad in gradients if grad is not None)]
            optimizer.step()
    return numbers


def difference(ours: Tensor, plain: Tensor) -> float:
    largest = plain.double().abs().max().item()
    return (ours.double() - plain.double()).abs().max().item() / largest if largest else 0.0


def compare(name: str) -> dict[str, Any]:
    """A row of the table."""
    callback = UnitScaleCallback()
    plain, again, ours = train(name), train(name), train(name, callback)
    coverage = callback.coverage
    equal = [same_bits(a, b) for a, b in zip(ours, plain, strict=True)]
    first_step = len(plain) // STEPS
    pairs = list(zip(ours, plain, strict=True))[:first_step]
    return {
        "architecture": name,
        "matmuls in units": f"{coverage.num_in_units} of {coverage.num_matmuls}",
        "tensors": len(plain),
        "plain again": sum(same_bits(a, b) for a, b in zip(again, plain, strict=True)),
        "with units": sum(equal),
        "with units, first step": sum(equal[:first_step]),
        "largest difference there": max(difference(a, b) for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("architectures", nargs="*", default=[*CORE, *WIDER])
    names = parser.parse_args().architectures
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    path = RESULTS / "compiled_bits.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {row["architecture"]: row for row in known}
    about = {**machine(), "transformers": transformers.__version__}
    for name in names:
        rows[name] = compare(name)
        print(rows[name], flush=True)
        content = {"machine": about, "steps": STEPS, "rows": list(rows.values())}
        path.write_text(json.dumps(content, indent=1) + "\n")
    print(tabulate([rows[name] for name in names], headers="keys"))


if __name__ == "__main__":
    main()
