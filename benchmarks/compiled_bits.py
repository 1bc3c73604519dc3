"""Does a model that its user compiled keep its bits when its products run in units?

For architectures of ``model_zoo.py`` in training mode: ``model.compile()``, then three steps of SGD
in FP32. The plain model runs twice, since some do not repeat themselves; then one with
``UnitScaleCallback`` attached runs the same steps. Compared are losses and gradients of all three
steps, bit for bit, and for those that differ the largest difference in the first step, relative to
the largest element of its tensor.

    python benchmarks/compiled_bits.py            # the twenty, some 40 minutes on one core
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
from benchmarks.model_zoo import CORE, ZOO
from lightning_unitscale import UnitScaleCallback, attach
from tests.helpers import same_bits

STEPS = 3


def train(name: str, callback: UnitScaleCallback | None = None) -> list[Tensor]:
    """Loss and gradients of each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    model.train().compile()
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
        "products in units": f"{coverage.num_in_units} of {coverage.num_products}",
        "tensors": len(plain),
        "plain again": sum(same_bits(a, b) for a, b in zip(again, plain, strict=True)),
        "with units": sum(equal),
        "with units, first step": sum(equal[:first_step]),
        "largest difference there": max(difference(a, b) for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("architectures", nargs="*", default=list(CORE), help="all of CORE if none")
    names = parser.parse_args().architectures
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rows = []
    for name in names:
        rows.append(compare(name))
        print(rows[-1], flush=True)
    print(tabulate(rows, headers="keys"))
    about = {**machine(), "transformers": transformers.__version__}
    content = {"machine": about, "steps": STEPS, "rows": rows}
    (RESULTS / "compiled_bits.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
