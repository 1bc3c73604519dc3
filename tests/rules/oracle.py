"""Oracles and helpers for tests of the rules."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.executed_matmuls import See, below, operands_read
from lightning_unitscale.capture.module_steps import (
    ModuleSteps,
    captured_forward,
    matmuls_of,
    steps_of,
)
from lightning_unitscale.rules.build_plan import Recorder
from lightning_unitscale.rules.flow import Flow
from lightning_unitscale.rules.plan import Decision, ParameterPlan, RulePlan
from lightning_unitscale.rules.residuals import Residual, find_residuals
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.roles import Structure, find_structure
from lightning_unitscale.rules.unit_weights import ParameterGradients
from tests.helpers import run, same_bits


def pass_of(module: nn.Module, kind: type) -> Any:
    """The one pass of a kind on a transformed module."""
    (match,) = (graph_pass for graph_pass in _steps(module).passes if isinstance(graph_pass, kind))
    return match


def plan_of(module: nn.Module) -> RulePlan:
    """Return the decisions for a module that has been called."""
    plan: RulePlan = pass_of(module, RuleRewrite).plan
    return plan


def parameters_of(module: nn.Module) -> dict[str, ParameterPlan]:
    return dict(plan_of(module).parameters)


def decisions_of(module: nn.Module) -> dict[str, Decision]:
    """Decisions by tensor name."""
    return {name.partition(":")[2]: decision for name, decision in plan_of(module).items()}


def decided(module: nn.Module, op: str) -> list[Decision]:
    """Decisions on operations of one name, in the order of execution."""
    return [decision for decision in plan_of(module).values() if decision.op == op]


def rules_alone(module: nn.Module) -> nn.Module:
    """A copy of a planned module in which the rules rewrite and nothing else does."""
    alone = copy.deepcopy(module)
    matmuls_of(alone).detach()
    steps = _steps(alone)
    steps.passes = [
        graph_pass for graph_pass in steps.passes if isinstance(graph_pass, RuleRewrite)
    ]
    steps.reset()
    return alone


@contextlib.contextmanager
def only_rules(module: nn.Module) -> Iterator[None]:
    """Applies only the rules to an existing capture, which is faster than a copy."""
    steps, matmuls = _steps(module), matmuls_of(module)
    matmuls.detach()
    passes = steps.passes
    steps.passes = [graph_pass for graph_pass in passes if isinstance(graph_pass, RuleRewrite)]
    pass_of_gradients = next(
        graph_pass for graph_pass in passes if isinstance(graph_pass, ParameterGradients)
    )
    pass_of_gradients.remove()
    for step in steps.steps.values():
        step.invalidate()
    try:
        yield
    finally:
        steps.passes = passes
        for step in steps.steps.values():
            step.invalidate()
        matmuls.attach_again()


def differing_parameters(module: nn.Module, *inputs: Any, **options: Any) -> list[str]:
    """Parameters whose gradient is not that of the rewritten function times its power of two.

    The results must have the same bits too; ``"output"`` stands for them.
    """
    with only_rules(module):
        expected = run(module, *inputs, **options)
    given = run(module, *inputs, **options)
    gradients = pass_of(module, ParameterGradients)
    gradients.settle()
    exponents = gradients.log2_factors
    pairs = zip(tree_leaves(given["output"]), tree_leaves(expected["output"]), strict=True)
    same = all(same_bits(pair, other) for pair, other in pairs if isinstance(pair, Tensor))
    names = [] if same else ["output"]
    for fqn, gradient in expected["parameters"].items():
        other = given["parameters"][fqn]
        if gradient is None or other is None:
            same = gradient is other
        else:
            same = same_bits(gradient * 2.0 ** exponents.get(fqn, 0), other)
        if not same:
            names.append(fqn)
    return names


class MatmulMeter:
    """Separate gradients of matmul outputs from other operands of matmul kernels."""

    def __init__(self) -> None:
        self.readings: list[tuple[str, float]] = []
        self.gradients: list[tuple[str, float]] = []
        self.in_backward = False
        # Kept alive, so that no later tensor gets the same memory.
        self._seen: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.readings) + len(self.gradients)

    def see(self, name: str, operand: Tensor) -> None:
        """Note the operands of a kernel; a copy in another unit counts as a gradient."""
        address = operand.untyped_storage().data_ptr()
        if not self.in_backward:
            self._seen[address] = operand
        group = self.readings if address in self._seen else self.gradients
        group.append((name, rms(operand)))


class _Asked(TorchDispatchMode):
    """Show the operands of torch's matmul kernels for a module."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see = see

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Captured graphs run under this mode as they do without it."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for position in operands_read(func._schema.name, args):
            self._see(f"{func._schema.name}[{position}]", args[position])
        return func(*args, **(kwargs or {}))


def operands_of(module: nn.Module, *inputs: Any) -> MatmulMeter:
    """RMS of the operands of torch's matmul kernels in one seeded step."""
    module.zero_grad()
    torch.manual_seed(3)
    meter = MatmulMeter()
    # Kernels of other modules, which are in units, may be there if this one is not.
    has_units = matmuls_of(module) is not None
    with below(module, meter.see) if has_units else _Asked(meter.see):
        loss = module(*inputs)
        meter.in_backward = True
        loss.backward()
    return meter


def share_within(values: list[tuple[str, float]], factor: float) -> float:
    """Share of RMS values within a factor of 1, without tensors of zeros."""
    sizes = [value for _, value in values if value != 0.0]
    assert sizes
    return sum(1 / factor <= size <= factor for size in sizes) / len(sizes)


def flow_of(module: nn.Module, *inputs: Any) -> Flow:
    """The operations of one call of a module."""
    recorder = Recorder()
    _, step = captured_forward(module, "test")
    step.rehearse(recorder, *inputs)
    return recorder.result()


def residuals_of(module: nn.Module, *inputs: Any) -> list[Residual]:
    return list(find_residuals(flow_of(module, *inputs)).values())


def structure_of(module: nn.Module, *inputs: Any) -> Structure:
    flow = flow_of(module, *inputs)
    return find_structure(flow)


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def _steps(module: nn.Module) -> ModuleSteps:
    steps = steps_of(module)
    assert steps is not None
    return steps
