"""What a pipeline of a module's own step would be like: its graph is captured, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lightning_unitscale.graph.compiled_graph import CompiledGraph
from lightning_unitscale.graph.steps import ModuleSteps
from lightning_unitscale.pipeline.explain import PipelinePlan, plan_of
from lightning_unitscale.pipeline.flow import MultiUseParameterConfig
from lightning_unitscale.pipeline.front import build_pipe, cut_by
from lightning_unitscale.pipeline.microbatches import split_evenly
from lightning_unitscale.pipeline.policy import balanced_split, note_costs
from lightning_unitscale.pipeline.step_program import (
    example_outputs,
    program_of_step,
    static_shapes,
)

_OWNER = "explain_step"


def explain_step(
    module: nn.Module,
    batch: Any,
    num_stages: int,
    *args: Any,
    num_microbatches: int | None = None,
    method: str = "training_step",
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **kwargs: Any,
) -> PipelinePlan:
    """Balance a step over stages, as a pipeline would, and say what they cost.

    Args:
        module: The module; left as it is.
        batch: A whole batch.
        num_stages: Stages, each on a device of its own.
        *args: What the step is called with behind the batch.
        num_microbatches: Equal parts of the batch; by default twice the stages.
        method: Name of the step.
        context: Entered around the step, such as ``lambda: torch.autocast("cpu", torch.bfloat16)``.
        **kwargs: Keyword arguments of the step.

    Raises:
        ValueError: If an argument is out of range, the batch cannot be divided, or the step cannot
            be cut so often.
        RuntimeError: If the step is not one graph, or returns no loss.
    """
    count = 2 * num_stages if num_microbatches is None else num_microbatches
    policy = balanced_split(num_stages, num_microbatches=count)
    part = split_evenly(batch, count)[0]
    steps = ModuleSteps(module, (method,), defer=("log", "log_dict"))
    calls: list[tuple[CompiledGraph, tuple[Any, ...], list[Any]]] = []

    def record(graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
        calls.append((graph, inputs, example_outputs(graph.base)))
        return calls[-1][2]

    steps.attach(_OWNER)
    try:
        with static_shapes(), context():
            result = steps.steps[method].rehearse(record, part, *args, **kwargs)
        breaks = "; ".join(dict.fromkeys(steps.graph_breaks))
        if breaks or len(calls) != 1:
            raise RuntimeError(
                f"{type(module).__name__}.{method} is not one graph ({breaks or len(calls)}); "
                "expected tensor operations without branches on values, printing or third-party "
                "calls between them; keep those out of the step."
            )
        graph, inputs, outputs = calls[0]
        loss = result["loss"] if isinstance(result, dict) else result
        place = next((place for place, one in enumerate(outputs) if one is loss), None)
        program, _ = program_of_step(graph.base, graph.inputs, module, inputs, place)
        if cut_by(program, None, required=False):
            note_costs(program.graph_module)
        else:
            cut_by(program, policy, required=True)
        pipe = build_pipe(program, module, lambda name: MultiUseParameterConfig.REPLICATE)
        return plan_of(pipe, module, num_microbatches)
    finally:
        steps.detach(_OWNER)
