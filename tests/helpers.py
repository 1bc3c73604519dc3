"""Provide the oracles that several test files share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from benchmarks.executed_matmuls import below_all_kernels, operands_read
from lightning_unitscale.capture import dynamo_capture as capture
from lightning_unitscale.capture.copy_graphs import copy_graph_module
from lightning_unitscale.capture.graph_nodes import Names
from lightning_unitscale.capture.module_steps import captured_forward


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Return the cases of a test, of which the first tier runs the first of every so many."""
    return [
        pytest.param(case, marks=[pytest.mark.slow] if index % every else [])
        for index, case in enumerate(cases)
    ]


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Check that shape, type and every bit are equal, also the signs of zero and of NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    first, second = (one.detach().contiguous().reshape(-1) for one in (first, second))
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def assert_same_bits(first: Any, second: Any) -> None:
    """Assert that two structures are the same and their tensors have the same bits."""
    (leaves, spec), (others, other_spec) = tree_flatten(first), tree_flatten(second)
    assert spec == other_spec
    for one, other in zip(leaves, others, strict=True):
        if isinstance(one, Tensor):
            assert same_bits(one, other), f"{one}\n{other}"
        else:
            assert one == other


def captured_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose ``forward`` runs captured graphs without changes."""
    return captured_forward(module, "test")[0]


def run(
    module: Callable[..., Any],
    *inputs: Any,
    seed: int = 3,
    around_backward: AbstractContextManager[Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return output, gradients of inputs and parameters, and buffers after one seeded step.

    A result that is not a scalar gets a fixed, uneven gradient. The buffers are restored.
    """
    inputs, options = tree_map(
        lambda one: (
            one.detach().clone().requires_grad_(one.requires_grad)
            if isinstance(one, Tensor)
            else one
        ),
        (inputs, options),
    )
    parameters = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    buffers = dict(module.named_buffers()) if isinstance(module, nn.Module) else {}
    before = {name: one.clone() for name, one in buffers.items()}
    for one in parameters.values():
        one.grad = None
    torch.manual_seed(seed)
    output = module(*inputs, **options)
    leaves = [
        one for one in tree_flatten(output)[0] if isinstance(one, Tensor) and one.requires_grad
    ]
    seeds = [
        torch.linspace(-1.0, 2.0, one.numel()).to(one.dtype).view(one.shape)
        if one.dim()
        else torch.ones_like(one)
        for one in leaves
    ]
    with around_backward or nullcontext():
        if leaves:
            torch.autograd.backward(leaves, seeds)
    after = {name: one.clone() for name, one in buffers.items()}
    with torch.no_grad():
        for name, one in buffers.items():
            one.copy_(before[name])
    tensors = [one for one in tree_flatten((inputs, options))[0] if isinstance(one, Tensor)]
    return {
        "output": output,
        "inputs": [one.grad for one in tensors],
        "parameters": {name: one.grad for name, one in parameters.items()},
        "buffers": after,
    }


def captured(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """Capture ``function`` on ``inputs`` as a single graph, and return a named copy."""
    graphs: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        module = function if isinstance(function, nn.Module) else nn.Module()
        description = capture.describe(graph_module, example_inputs, module)
        copied = copy_graph_module(graph_module)
        Names().assign(description, copied)
        graphs.append(copied)
        return graph_module.forward

    torch.compile(function, backend=backend)(*inputs)
    assert len(graphs) == 1
    return graphs[0]


class CalledOperators(TorchDispatchMode):
    """A mode that records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """Return their names without namespace and overload."""
        return [operator.overloadpacket.__name__ for operator in self.operators]


class OperandMeter(TorchDispatchMode):
    """A mode that records the RMS of the operands of ATen's matmuls, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[tuple[str, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for position in operands_read(func._schema.name, args):
            rms = float(args[position].detach().double().square().mean().sqrt())
            if math.isfinite(rms) and rms > 0:
                self.readings.append((f"{func._schema.name}[{position}]", rms))
        return func(*args, **(kwargs or {}))


def operand_scales(make: Callable[[], nn.Module], *inputs: Any) -> list[tuple[str, float]]:
    """Return the RMS of every operand that torch's matmul kernels read in a seeded step.

    Args:
        make: Creates the module, which must not exist before.
        *inputs: The inputs of the step.
    """
    readings: list[tuple[str, float]] = []

    def see(name: str, operand: Tensor) -> None:
        rms = float(operand.double().square().mean().sqrt())
        if math.isfinite(rms) and rms > 0:
            readings.append((name, rms))

    def step() -> None:
        module = make()
        readings.clear()
        run(module, *inputs)

    with below_all_kernels(see):
        step()
    return readings


# Tests use them for behavior that differs in torch 2.11, or from 2.14 on.
IS_TORCH_2_11 = torch.torch_version.TorchVersion(torch.__version__) < "2.12"
IS_TORCH_2_14 = torch.torch_version.TorchVersion(torch.__version__) >= "2.14"


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast values to another type. E4M3FN saturates as in torch 2.13; torch 2.11 casts to NaN."""
    if dtype is torch.float8_e4m3fn and torch.tensor(1e9).to(dtype).isnan():
        values = values.clamp(-448.0, 448.0)
    return values.to(dtype)
