"""Two rehearsals of a step: one to see how it hangs together, one to decide and to measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.graph.capture import is_checkpoint
from lightning_unitscale.graph.nodes import INPUT
from lightning_unitscale.transforms.calibration import root_mean_square
from lightning_unitscale.transforms.rules.decide import Decider
from lightning_unitscale.transforms.rules.flow import Flow
from lightning_unitscale.transforms.rules.plan import Argument, Decision, ParameterPlan

_STEPS_PER_OCTAVE = 32

# Reads the stored value of a parameter as it will be.
Prepare = Callable[[str, Tensor], Tensor]


class Rehearsal:
    """Runs the graphs of a step with every factor in place as soon as it is decided.

    Args:
        flow: The step as recorded.
        prepare: Gives a parameter the value that it will have.

    Attributes:
        saw_new_graph: Whether a graph ran that was not recorded: the first run of a step may change
            what the next one runs (a setting that is filled in, a cache).
    """

    def __init__(self, flow: Flow, prepare: Prepare) -> None:
        self.flow = flow
        self.prepare = prepare
        self.saw_new_graph = False
        self.decider: Decider | None = None
        self._values: dict[fx.Node, Any] = {}
        self._measured: dict[fx.Node, float | None] = {}

    def __call__(self, graph: Any, inputs: tuple[Any, ...]) -> Any:
        """Run one graph; the interpreter that ``CapturedStep`` expects."""

        def run_with(captured: fx.GraphModule) -> Callable[..., Any]:
            graph_module = self.flow.known(captured)
            if not self.flow.has_graph(graph_module.graph):
                self.saw_new_graph = True
                return fx.Interpreter(graph_module).run
            return _Interpreter(graph_module, self).run

        return graph.interpret(run_with, inputs)

    def measure(self, node: fx.Node) -> float | None:
        """RMS of a node's tensor, once it is there."""
        for one in (node, self.flow.resolve(node)):
            if one in self._values:
                if one not in self._measured:
                    self._measured[one] = _rms(self._values[one])
                return self._measured[one]
        return None


class _Interpreter(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule, rehearsal: Rehearsal) -> None:
        super().__init__(graph_module)
        self.rehearsal = rehearsal

    def run_node(self, n: fx.Node) -> Any:
        rehearsal = self.rehearsal
        decider = rehearsal.decider
        assert decider is not None
        if is_checkpoint(n):
            body, *values = self.fetch_args_kwargs_from_env(n)[0]
            return _Interpreter(body, rehearsal).run(*values)
        if n.op == "placeholder":
            return self._keep(n, self._prepared(n, super().run_node(n)))
        decision = decider.before(n)
        if decision is None:
            return self._keep(n, super().run_node(n))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = changed_arguments(args, kwargs, decision)
        result = getattr(self, n.op)(n.target, args, kwargs)
        self._keep(n, result)
        decision = decider.after(n, decision)
        if decision.output != 1.0:
            result = result * decision.output
            rehearsal._measured.pop(n, None)
        return self._keep(n, result)

    def _prepared(self, node: fx.Node, value: Any) -> Any:
        given = node.meta.get(INPUT)
        if given is None or given.kind != "parameter" or not isinstance(value, Tensor):
            return value
        return self.rehearsal.prepare(given.fqn, value)

    def _keep(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            self.rehearsal._values[node] = value.detach()
        return value


def changed_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], decision: Decision
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call with the factors of a decision on them."""
    changed_args, changed_kwargs = list(args), dict(kwargs)
    for one in decision.arguments:
        head, rest = one.path[0], one.path[1:]
        holder: Any = changed_args if isinstance(head, int) else changed_kwargs
        holder[head] = _scaled(holder[head], rest, one)
    changed_kwargs.update(dict(decision.kwargs))
    return tuple(changed_args), changed_kwargs


def _scaled(value: Any, rest: tuple[int | str, ...], argument: Argument) -> Any:
    if not rest:
        return value * argument.factor
    items: Any = list(value)
    items[rest[0]] = _scaled(items[rest[0]], rest[1:], argument)
    return type(value)(items) if isinstance(value, (list, tuple)) else items


def prepared_like(plans: Mapping[str, ParameterPlan]) -> Prepare:
    """Values of parameters as their plans say, without changing the parameters."""
    sigmas: dict[str, float] = {}

    def prepare(fqn: str, value: Tensor) -> Tensor:
        plan = plans.get(fqn)
        if plan is None or plan.action == "left":
            return value
        if plan.action == "zeroed":
            return value * 0.0
        if fqn not in sigmas:
            sigmas[fqn] = parameter_rms(value)
        return value / sigmas[fqn]

    return prepare


def parameter_rms(value: Tensor) -> float:
    """RMS of a parameter's entries that are not zero, to about 1 %; 1 for one without any.

    Layers of one kind are drawn with RMS values that differ by less, and sharing one lets their
    learning rates share a parameter group in a step.

    The row of a padding token is zero by choice and no part of the distribution.
    """
    with torch.no_grad():
        nonzero = int(torch.count_nonzero(value))
        if nonzero == 0:
            return 1.0
        rms = float(root_mean_square(value)) * (value.numel() / nonzero) ** 0.5
    if not 0.0 < rms < float("inf"):
        return 1.0
    return 2.0 ** (round(math.log2(rms) * _STEPS_PER_OCTAVE) / _STEPS_PER_OCTAVE)


def _rms(value: Tensor) -> float | None:
    if value.numel() == 0:
        return None
    # Minus infinity in a mask is no scale.
    return float(root_mean_square(value))
