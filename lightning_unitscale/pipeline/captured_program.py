"""Capture a module's ``forward``, a ``training_step`` or a module that it calls as a program.

The parameters are inputs of a step's graph, but named attributes of a program. Inputs that a pass
adds (factors, keys of random rounding) are made on every rank, like the batch. They are never sent.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten
from typing_extensions import override

from lightning_unitscale.capture import graph_nodes
from lightning_unitscale.capture.aliasing import memory_roots, written_arguments
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.copy_graphs import copy_graph_module, fake_mode_of
from lightning_unitscale.capture.graph_nodes import call as call_of
from lightning_unitscale.capture.graph_variants import GraphCall
from lightning_unitscale.capture.held_inputs import WriteProtected
from lightning_unitscale.capture.module_steps import (
    ModuleSteps,
    export_forward,
    reject_compiled,
    steps_of,
)
from lightning_unitscale.capture.passes import Phase, StepGraph
from lightning_unitscale.capture.rollback import restoring, set_up_by
from lightning_unitscale.matmuls.session import run_inside
from lightning_unitscale.memory.profile_step import refuse_lazy, refuse_without_forward
from lightning_unitscale.patching import nothing, shadowed
from lightning_unitscale.pipeline.dataflow import is_call
from lightning_unitscale.pipeline.program import (
    LossSpec,
    LossWrapper,
    Program,
    ProgramInput,
    loss_index,
    named_tensors,
)
from lightning_unitscale.pipeline.rank_metrics import SharedMetrics

_EXAMPLE = "example_value"
# Types that a captured graph can return.
_RETURNABLE = (Tensor, int, float, bool, str, type(None), tuple, list)
LOGS = ("log", "log_dict")  # the log methods of a LightningModule
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one call


def capture_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss_spec: LossSpec = None,
) -> Program:
    """Capture ``module.forward`` for example arguments, without computing anything."""
    reject_compiled(module, "")
    refuse_without_forward(module, "pass the model inside of it, or see explain_step for a step")
    refuse_lazy(module)
    args, kwargs = _distinct((tuple(args), dict(kwargs)))
    left_out: list[str] = []
    with shadowed(module, forward=returnable_method(module, "forward", left_out)):
        graph_module = export_forward(module, args, dict(kwargs), expand=False, plain=True)
    graph = graph_module.graph
    structure = graph._codegen.pytree_info  # type: ignore[attr-defined]
    in_spec, out_spec = structure.in_spec, structure.out_spec
    graph.set_codegen(fx.graph.CodeGen())
    inputs = _describe(module, args, kwargs)
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise RuntimeError(
            f"{type(module).__name__}: its graph has {len(placeholders)} inputs, but the call has "
            f"{len(inputs)}. Pass only tensors and plain values as arguments."
        )
    _name_by_origin(graph)
    roots = memory_roots(graph)
    for node in graph.nodes:
        for target in written_arguments(node):
            if roots[target].op == "placeholder":
                name, written = map(graph_nodes.tensor_name, (node, roots[target]))
                raise ValueError(
                    f"{type(module).__name__}: {name} writes into the argument {written}. Every "
                    "stage reads its own copy of the arguments. Clone the argument first."
                )
    outputs: Any = graph.output_node().args[0]
    structured = tree_unflatten(list(outputs), out_spec)
    scalars = [
        (example := graph_nodes.example_tensor(output)) is not None
        and example.numel() == 1
        and example.is_floating_point()
        and example.requires_grad
        for output in outputs
    ]
    is_loss = isinstance(module, LossWrapper)
    loss = loss_index(structured, scalars, loss_spec, is_loss=is_loss)
    left_out = list(dict.fromkeys(left_out))
    if left_out:
        warnings.warn(
            f"{type(module).__name__}: its outputs {left_out} are not tensors, so the pipeline "
            "does not return them. Switch them off (use_cache=False) to silence this.",
            stacklevel=3,
        )
    return Program(graph_module, inputs, in_spec, out_spec, loss, tuple(left_out))


def _distinct(value: Any) -> Any:
    """Copy repeated tensors (``labels=input_ids``), which would be captured as one input."""
    seen: set[int] = set()

    def distinct(tensor: Tensor) -> Tensor:
        if id(tensor) in seen:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        seen.add(id(tensor))
        return tensor

    return tree_map_only(Tensor, distinct, value)


def _describe(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[ProgramInput, ...]:
    names: dict[int, str] = {}
    with contextlib.suppress(TypeError, ValueError):
        names = dict(enumerate(inspect.signature(module.forward).parameters))
    inputs = []
    for path, value in tree_flatten_with_path((args, dict(kwargs)))[0]:
        side, first, *rest = cast(tuple[Any, ...], path)
        name = first.key if side.idx else names.get(first.idx, f"argument {first.idx}")
        inputs.append(ProgramInput.of(f"{name}{''.join(map(str, rest))}", value))
    return tuple(inputs)


def returnable_method(
    module: nn.Module, name: str, left_out: list[str] | None = None
) -> Callable[..., Any]:
    """Return a method that keeps only those values of a mapping that a graph can return."""
    # Hugging Face models return a cache object by default. Training does not need it.
    if name in module.__dict__:
        return module.__dict__[name]
    method = getattr(type(module), name)

    # Called while Dynamo traces: traced code cannot append to a list that survives an export.
    @torch.compiler.assume_constant_result
    def leave_out(key: str) -> bool:
        if left_out is not None:
            left_out.append(key)
        return True

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if isinstance(result, dict):
            kept = {}
            for key, value in result.items():
                if isinstance(value, _RETURNABLE):
                    kept[key] = value
                else:
                    leave_out(key)
            if len(kept) < len(result):
                return type(result)(**kept)
        return result

    return types.MethodType(forward, module)


def _name_by_origin(graph: fx.Graph) -> None:
    """Remove the replaced ``forward`` from module paths, and name attributes by their paths."""
    for node in graph.nodes:
        for key in {graph_nodes.MODULE, graph_nodes.NAME} & node.meta.keys():
            node.meta[key] = str(node.meta[key]).removeprefix("forward.")
        if node.meta.get(graph_nodes.MODULE) == "forward":
            node.meta[graph_nodes.MODULE] = ""
        if node.op == "get_attr":
            node.meta[graph_nodes.NAME] = str(node.target)


@dataclass(frozen=True)
class StepProgram:
    """The program of a captured step."""

    program: Program
    step_graph: StepGraph  # the captured graph after the passes
    positions: list[int]  # the indices of the program's inputs among those of the graph

    def inputs(self, call: GraphCall) -> list[Any]:
        """Return the program's inputs for a call: the user's and those of the passes."""
        values = [*call.inputs, *(supply() for _, supply in self.step_graph.states)]
        return [values[position] for position in self.positions]


def program_of_step(
    call: GraphCall,
    module: nn.Module,
    loss: int | None,
    rewrite: Callable[[StepGraph, int | None], None] = nothing,
) -> StepProgram:
    """Make the program of a step's graph. ``rewrite`` gets the loss and changes the graph first."""
    step_graph = call.graph.rewritten()
    if step_graph.results:
        raise RuntimeError(
            f"{step_graph.step}: a pass needs results of the whole graph, which a pipeline does "
            "not have. Only UnitScaleCallback, ScaleMonitor and RematCallback work in a pipeline. "
            "Take other transforms off the module."
        )
    rewrite(step_graph, loss)
    fill_examples(step_graph.graph)
    graph_module = copy_graph_module(step_graph.graph_module)
    graph = graph_module.graph
    read = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    attributes = {name: operator.attrgetter(name)(graph_module) for name in read}
    tensors = named_tensors(module, remove_duplicate=False)
    positions: list[int] = []
    described: list[ProgramInput] = []
    placeholders = list(graph.find_nodes(op="placeholder"))
    examples = step_graph.example_inputs(call.inputs)
    for position, (node, example) in enumerate(zip(placeholders, examples, strict=True)):
        # The inputs of the passes come after the user's.
        given = call.graph.inputs[position] if position < len(call.graph.inputs) else None
        fqn = given.fqn if given else None
        if fqn is None:
            positions.append(position)
            described.append(ProgramInput.of(given.source if given else node.name, example))
            continue
        attributes[fqn] = tensors[fqn]
        with graph.inserting_after(placeholders[-1]):
            attribute = graph.create_node("get_attr", fqn)
        attribute.meta.update({**node.meta, graph_nodes.NAME: fqn})
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    outputs: Any = graph.output_node().args[0]
    program = Program(
        fx.GraphModule(attributes, graph),
        tuple(described),
        in_spec=tree_flatten(((None,) * len(described), {}))[1],
        out_spec=tree_flatten([0] * len(outputs))[1],
        loss=loss,
    )
    return StepProgram(program, step_graph, positions)


def fill_examples(graph: fx.Graph) -> None:
    """Add fake examples to operations that a pass has inserted without one."""
    for node in graph.nodes:
        # Every captured operation has a name.
        if not is_call(node) or {graph_nodes.NAME, _EXAMPLE} & node.meta.keys():
            continue
        read = node.all_input_nodes
        if read and all(_EXAMPLE in operand.meta for operand in read):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: read.meta[_EXAMPLE])
            with fake_mode_of(graph), torch.enable_grad():
                node.meta[_EXAMPLE] = call_of(node.target, args, kwargs)


def example_outputs(base: fx.GraphModule) -> list[Any]:
    """Return zeros shaped like the graph's results, and its constant results."""
    returned: Any = base.graph.output_node().args[0]
    return [
        value
        if (example := graph_nodes.example_tensor(value)) is None
        else torch.zeros(example.shape, dtype=example.dtype, device=example.device)
        for value in returned
    ]


def loss_position(
    step: CapturedStep, call: GraphCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int | None:
    """Return the position of the loss among the outputs of a step's graph."""
    # The loss is the only output with a gradient. If there are several, the step runs once on
    # stand-ins for them and returns the loss.
    if len(call.differentiable) == 1:
        return call.differentiable[0]
    outputs = example_outputs(call.graph.base)
    with restoring(step.owner.module, parameters=False):
        result = step.rehearse(lambda graph, inputs: outputs, *args, **kwargs)
    loss = graph_nodes.returned_loss(result)
    return next((index for index, output in enumerate(outputs) if output is loss), None)


class CalledSteps(ModuleSteps):
    """The user's own methods of a module and its submodules, captured: ``"net.forward"``."""

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        *,
        defer: Sequence[str] = (),
        like: ModuleSteps | None = None,
    ) -> None:
        super().__init__(module, names, defer=defer)
        self._like = like  # Steps of callbacks. These are observed whenever those are.
        if like is not None:
            self.rewriter = like.rewriter
            self.passes = [one for one in like.passes if one.phase is Phase.OBSERVE]

    @property
    @override
    def observed(self) -> bool:
        return super().observed if self._like is None else self._like.observed

    @override
    def original(self, name: str) -> Callable[..., Any]:
        """Return the user's own method, even if a captured one replaces it."""
        path, _, method = name.rpartition(".")
        if path:
            return returnable_method(self.module.get_submodule(path), method)
        steps = steps_of(self.module)
        if steps is None or steps is self or name not in steps.steps:
            return super().original(name)
        return steps.original(name)


class _ReachedError(BaseException):
    """Signal that a step has called a module. A step could catch an ``Exception``."""


def with_most_parameters(module: nn.Module) -> list[str]:
    """Return the paths of modules with more than half of the parameters, outermost first."""
    total = sum(parameter.numel() for parameter in module.parameters())
    return [
        path
        for path, submodule in module.named_modules()
        if 2 * sum(parameter.numel() for parameter in submodule.parameters()) > total
    ]


def without(paths: Sequence[str], path: str) -> list[str]:
    """Return the paths without ``path`` and without the modules around it."""
    return [
        other for other in paths if other and other != path and not path.startswith(f"{other}.")
    ]


def first_called(
    module: nn.Module, paths: Sequence[str], run: Callable[[], Any]
) -> tuple[str, Arguments] | None:
    """Return which of the modules at ``paths`` a step calls first, and the arguments."""

    def reach(path: str, *args: Any, **kwargs: Any) -> Any:
        raise _ReachedError(path, (args, kwargs))

    try:
        with contextlib.ExitStack() as stack:
            for path in paths:
                stack.enter_context(
                    shadowed(module.get_submodule(path), forward=partial(reach, path))
                )
            run()
    except _ReachedError as reached:
        path, arguments = reached.args
        return path, arguments
    return None


def without_logs(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a module's log methods do nothing."""
    return shadowed(module, **{name: nothing for name in LOGS if hasattr(module, name)})


def sets_up(steps: ModuleSteps, run: Callable[[], Any]) -> bool:
    """Run code of a module uncaptured, and return whether that set anything up."""
    # If so, nothing is captured any more, and a step that was not one graph may be one now. The
    # code logs nothing and may fail. It ends where it would write into a parameter.
    module = steps.module

    def run_first() -> None:
        with without_logs(module), contextlib.suppress(Exception), WriteProtected(module):
            run_inside(run)  # a session around it neither scales nor counts its matmuls

    with SharedMetrics(module).unchanged():
        is_set_up = set_up_by(run_first, module, keeps_root=False)
    if is_set_up:
        steps.reset()
    return is_set_up


def forward_of(path: str) -> str:
    """Return the name of a module's ``forward`` among the steps of :class:`CalledSteps`."""
    return f"{path}.forward" if path else "forward"


def as_attribute(path: str) -> str:
    """Return a path as an expression in the module's code, such as ``self.net``."""
    return f"self.{path}" if path else "self"
