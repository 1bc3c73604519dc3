"""Is every operator of torch bit-identical when matmuls are scaled?

Takes the samples of torch's own test database (``torch.testing``'s ``op_db``), makes a module of
each, out of place and in place, whose loss reads all results, and compares the loss and all
gradients of the plain module with those of the unit-scaled one, bit for bit. A gradient that is not
there has to be none, and not zeros. Left out are operators whose plain runs differ among
themselves, and samples that the plain module does not take either.

Run: ``python benchmarks/operator_bits.py``, some 8 minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_unitscale.transforms import lossless_unit_scale
from tests.helpers import same_bits

Numbers = list[Tensor | None]
MOST_SAMPLES = 40  # of a database entry; those that are run are spread over these


class Loss(nn.Module):
    """``() -> loss`` of one operator on one sample, whose tensors are parameters and buffers."""

    def __init__(self, operator: Callable[..., Any], sample: Any) -> None:
        super().__init__()
        self.operator = operator
        leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.names: list[str | None] = []
        self.others: list[Any] = []
        for index, leaf in enumerate(leaves):
            is_tensor = isinstance(leaf, Tensor)
            self.names.append(f"leaf_{index}" if is_tensor else None)
            self.others.append(None if is_tensor else leaf)
            if is_tensor and leaf.is_floating_point() and leaf.requires_grad:
                self.register_parameter(f"leaf_{index}", nn.Parameter(leaf.detach().clone()))
            elif is_tensor:
                self.register_buffer(f"leaf_{index}", leaf.detach().clone())
        self.register_buffer("one", torch.ones(()))

    def forward(self) -> Tensor:
        leaves = []
        for name, other in zip(self.names, self.others, strict=True):
            leaf = other if name is None else getattr(self, name)
            # Something of the graph's own, into which an operator in place may write.
            leaves.append(leaf * self.one if isinstance(leaf, nn.Parameter) else leaf)
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        loss = self.one * 0
        for result in tree_flatten(self.operator(first, *args, **kwargs))[0]:
            if isinstance(result, Tensor) and result.is_complex():
                result = torch.view_as_real(result.resolve_conj())
            if isinstance(result, Tensor) and result.is_floating_point():
                weights = torch.cos(torch.arange(result.numel(), dtype=result.dtype))
                loss = loss + (result * weights.view(result.shape)).sum()
        return loss


def step(module: nn.Module) -> Numbers:
    """The loss, and the gradient of every parameter."""
    module.zero_grad()
    torch.manual_seed(3)
    loss = module()
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), *(one.grad for one in module.parameters())]


def is_same(ours: Numbers, plain: Numbers) -> bool:
    """Whether the same numbers are there, and all their bits are the same."""
    return all(
        a is b is None or (a is not None and b is not None and same_bits(a, b))
        for a, b in zip(ours, plain, strict=True)
    )


def compare(operator: Callable[..., Any], sample: Any) -> str | None:
    """The result of a sample; ``None`` if it shows nothing."""
    torch._dynamo.reset()
    try:
        plain, other = Loss(operator, sample), Loss(operator, sample)
        expected = step(plain)
        if not (is_same(step(plain), expected) and is_same(step(other), expected)):
            return None
    except Exception:  # not a sample for a module
        return None
    try:
        scaled = lossless_unit_scale(other)
        return "same bits" if all(is_same(step(scaled), expected) for _ in "12") else "other bits"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"


def cases(each: int) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Name, operator and sample."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if torch.float32 not in info.dtypes:
            continue
        needs_grad = info.supports_autograd
        try:
            found = info.sample_inputs("cpu", torch.float32, requires_grad=needs_grad)
            samples = list(itertools.islice(found, MOST_SAMPLES))
        except Exception:  # entries that make none on a CPU
            continue
        count = min(each, len(samples))
        for way, operator in (("", info.op), ("in place", info.inplace_variant)):
            for index in range(count if operator is not None else 0):
                yield (
                    f"{info.formatted_name} {way}".strip(),
                    operator,
                    samples[index * len(samples) // count],
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--each", type=int, default=2, help="samples of each operator")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    others: dict[str, str] = {}
    operators: set[str] = set()
    for name, operator, sample in cases(options.each):
        outcome = compare(operator, sample)
        if outcome is None:
            continue
        operators.add(name)
        counts["same bits" if outcome == "same bits" else "other"] += 1
        if outcome != "same bits":
            others[name] = outcome
            print(f"{name}: {outcome}", flush=True)
    rows = [{"operators": len(operators), "samples": counts.total(), **counts}]
    print(tabulate(rows, headers="keys"))
    content = {"setting": vars(options), "machine": machine(), "rows": rows, "others": others}
    (RESULTS / "operator_bits.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
