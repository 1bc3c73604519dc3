"""Measure lossless unit scaling of published architectures.

For every architecture of ``model_zoo.py``: whether it runs, whether loss and
gradients are the plain model's bit for bit, and how near to RMS 1 the operands of the matrix
matmuls are. Operands are what torch's own kernels read, forward and backward, below everything
that the package does.

    python benchmarks/architectures.py                # all of them, one table, one JSON file
    python benchmarks/architectures.py GPT-2 T5       # some
    python benchmarks/architectures.py --core         # the twenty
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.architecture_tables import Result, Shares, markdown, summary, table
from benchmarks.executed_matmuls import below, below_all_kernels, operands_read
from benchmarks.model_zoo import CORE, ZOO
from lightning_unitscale import transforms
from lightning_unitscale.transforms import lossless_unit_scale

RESULTS = Path(__file__).parent / "results" / "architectures.json"
SEED = 1234
WITHIN = 1.5

# Operators of the backward pass alone, whose first operand is the arriving gradient.
_BACKWARD = {
    "aten::convolution_backward",
    "aten::conv_tbc_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}


@dataclass
class Operands:
    """RMS of operands of executed matmuls, with the operator that read each one."""

    forward: list[tuple[str, float]] = field(default_factory=list)
    stored: list[tuple[str, float]] = field(default_factory=list)
    gradients: list[tuple[str, float]] = field(default_factory=list)


# What kind of operand a matmul is about to read, and the operator that the model asked for.
_Group = list[tuple[str, float]]
_Expected = tuple[_Group | None, str]


class MatmulObserver(TorchDispatchMode):
    """Reads the operands of all matmuls that run under it.

    A backward matmul reads stored operands and a gradient. A stored operand is known by its
    memory, which is kept alive so that it cannot be given to another tensor. The mode tells which
    is which by the tensors that autograd hands over; how large an operand is, the kernel below
    tells, which may get a copy in other units.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Captured graphs run under this mode as they do without it."""
        return True

    def start(self) -> None:
        """Forget all that was read."""
        self.operands = Operands()
        self.in_backward = False
        self._memory: dict[int, Tensor] = {}
        self._expected: list[_Expected] = []

    def see(self, name: str, operand: Tensor) -> None:
        """Note what a kernel reads, operand after operand."""
        if not self._expected:
            return
        group, operator = self._expected.pop(0)
        if group is not None:
            group.append((operator, root_mean_square(operand)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        positions = operands_read(name, args)
        operator = name.removeprefix("aten::")
        if name in _BACKWARD and positions:
            groups = [self.operands.gradients, *[self.operands.stored] * (len(positions) - 1)]
            self._expected = [(group, operator) for group in groups]
        else:
            self._expected = [(self._group_of(args[at]), operator) for at in positions]
        result = func(*args, **(kwargs or {}))
        assert not self._expected, f"no kernel was seen to run {name}"
        return result

    def _group_of(self, operand: Tensor) -> _Group | None:
        if not (operand.is_floating_point() or operand.is_complex()):
            return None
        address = operand.untyped_storage().data_ptr()
        if not self.in_backward:
            self._memory[address] = operand
            return self.operands.forward
        return self.operands.stored if address in self._memory else self.operands.gradients


@contextmanager
def observer_below() -> Iterator[MatmulObserver]:
    """An observer of modules that are scaled, run and gone within this context."""
    observer = MatmulObserver()
    with below_all_kernels(observer.see):
        yield observer


def root_mean_square(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(wide.abs().square().mean().sqrt())


def share_near_one(rms: Iterable[tuple[str, float]]) -> tuple[float, int]:
    """Share of the tensors with an RMS within a factor 1.5 of 1, and their number.

    A tensor that is zero everywhere, or empty, has no scale and is not counted.
    """
    values = [value for _, value in rms if value != 0.0]
    good = sum(1 / WITHIN <= value <= WITHIN for value in values)
    return (good / len(values) if values else 1.0), len(values)


@dataclass
class Step:
    """What one training step made."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def seed_everything() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def loss_of(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else output["loss"]
    assert isinstance(loss, Tensor)
    return loss


def run_step(model: nn.Module, inputs: Mapping[str, Any]) -> Step:
    """One forward and backward pass; the model keeps its buffers, so it can be run again."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.zero_grad()
    seed_everything()
    loss = loss_of(model(**inputs))
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    return Step(loss.detach(), gradients)


def observe_step(
    model: nn.Module, inputs: Mapping[str, Any], observer: MatmulObserver | None = None
) -> Operands:
    """Operands of every matmul of one forward and backward pass.

    Args:
        model: The model.
        inputs: Its inputs, by name.
        observer: Of :func:`observer_below`, opened before the model was scaled; without one the
            model may be scaled already.
    """
    if observer is None:
        own = MatmulObserver()
        with below(model, own.see):
            return observe_step(model, inputs, own)
    model.zero_grad()
    seed_everything()
    observer.start()
    with observer:
        loss = loss_of(model(**inputs))
        observer.in_backward = True
        loss.backward()
    operands = observer.operands
    observer.start()
    return operands


def differing_gradients(plain: Step, ours: Step) -> tuple[list[str], float]:
    """Parameters whose gradient is not the plain model's, and the largest relative difference."""
    names, largest = [], 0.0
    for name, expected in plain.gradients.items():
        given = ours.gradients[name]
        if (expected is None) != (given is None):
            names.append(name)
            largest = float("inf")
        elif expected is not None and given is not None and not equal_bits(expected, given):
            names.append(name)
            size = expected.double().abs().max()
            largest = max(largest, float((expected.double() - given.double()).abs().max() / size))
    return names, largest


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Equal values, NaN included."""
    return torch.equal(first.nan_to_num(), second.nan_to_num()) and torch.equal(
        first.isnan(), second.isnan()
    )


def shares_of(operands: Operands) -> Shares:
    forward, num_forward = share_near_one(operands.forward)
    stored, _ = share_near_one(operands.stored)
    gradients, num_gradients = share_near_one(operands.gradients)
    return Shares(forward, num_forward, stored, gradients, num_gradients)


def _tracks(name: str, inputs: Mapping[str, Any], plain: Step) -> bool:
    """Whether ``track_scales`` runs and leaves the loss as it is."""
    try:
        tracked = transforms.track_scales(ZOO[name]()[0])
        return equal_bits(plain.loss, run_step(tracked, inputs).loss)
    except Exception as error:
        print(f"{name}: track_scales: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return False


def first_line(text: str) -> str:
    """The messages, without advice and without the folders of this machine."""
    return re.sub(r"/\S*/site-packages/", "", text.splitlines()[0])


def examine(name: str, *, verbose: bool = False) -> Result:
    """Compare the plain model with its unit-scaled copy."""
    torch._dynamo.reset()
    with observer_below() as observer:
        return _examine(name, observer, verbose=verbose)


def _examine(name: str, observer: MatmulObserver, *, verbose: bool) -> Result:
    result = Result(name)
    start = time.perf_counter()
    model, inputs = ZOO[name]()
    plain_step = run_step(model, inputs)
    # Built anew where it matters: some models keep tensors of their last call.
    plain = observe_step(ZOO[name]()[0], inputs, observer)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, inputs = ZOO[name]()
            seed_everything()
            scaled = lossless_unit_scale(model, **inputs)
            our_step = run_step(scaled, inputs)
            ours = observe_step(scaled, inputs, observer)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}".splitlines()[0]
        if verbose:
            traceback.print_exc()
        return result
    result.plain, result.ours = shares_of(plain), shares_of(ours)
    result.loss_equal = equal_bits(plain_step.loss, our_step.loss)
    result.num_gradients = len(plain_step.gradients)
    result.differing, result.largest_difference = differing_gradients(plain_step, our_step)
    texts = (f"{one.category.__name__}: {one.message}" for one in caught)
    result.warnings = sorted(set(map(first_line, texts)))
    result.far = [
        (group, operator, rms)
        for group, values in asdict(ours).items()
        for operator, rms in values
        if rms != 0.0 and not 1 / WITHIN <= rms <= WITHIN
    ]
    result.seconds = time.perf_counter() - start
    return result


def examine_without_units(result: Result) -> None:
    """Add whether the plain model repeats itself, and whether its scales can be tracked."""
    torch._dynamo.reset()
    model, inputs = ZOO[result.architecture]()
    plain = run_step(model, inputs)
    again = run_step(ZOO[result.architecture]()[0], inputs)
    result.repeatable = not differing_gradients(plain, again)[0]
    result.tracking_equal = _tracks(result.architecture, inputs, plain)


def machine() -> dict[str, str]:
    return {
        "machine": f"{os.cpu_count()}-core {platform.machine()} CPU, one thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    parser.add_argument("--core", action="store_true", help="the twenty that are promised")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument(
        "--markdown", action="store_true", help="the table of docs/measurements/architectures.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names = arguments.names or list(CORE if arguments.core else ZOO)
    results = []
    for name in names:
        results.append(examine(name, verbose=arguments.verbose))
        examine_without_units(results[-1])
        if arguments.verbose:
            print(table(results[-1:]).splitlines()[-1], flush=True)
            for one in (*results[-1].far[:8], *results[-1].differing[:4]):
                print("   ", one)
            for line in results[-1].warnings:
                print("   ", line[:300])
    print(markdown(results) if arguments.markdown else table(results))
    print(summary(results))
    document = {**machine(), "results": [asdict(one) for one in results]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
