"""Capture the steps of a module, and let passes rewrite and an executor run their graphs.

Callbacks and transforms both use ``steps_of(module)``. Each adds its passes. The first owner
installs the captured steps on the module, and the last one removes them. The ``forward`` of an
ordinary module is captured in a copy that runs the graphs, or exported.

``torch.export._trace._export_to_torch_ir`` returns the graph of a strict export before it is
lowered, with ``F.*`` nodes, the user's inputs and outputs, and parameters under their own names.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType, MethodType
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn
from torch._dynamo import functional_export
from torch.export._trace import _export_to_torch_ir

from lightning_unitscale.arguments import check_instance
from lightning_unitscale.capture.aliasing import make_out_of_place
from lightning_unitscale.capture.answers import trace_one_graph
from lightning_unitscale.capture.breaks import is_of_dynamo, reason_raised, wants_dynamos_texts
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.decompose import expand_composites
from lightning_unitscale.capture.dynamo_capture import CapturedGraph, is_compiled, unmarked
from lightning_unitscale.capture.executors import CompileMode, Executor, GraphRewriter
from lightning_unitscale.capture.graph_nodes import Names
from lightning_unitscale.capture.module_state import ATTRIBUTE, ModuleState
from lightning_unitscale.capture.passes import GraphPass, PassRecord
from lightning_unitscale.capture.patches import plain_libraries
from lightning_unitscale.capture.rollback import detached_copy, set_up_by
from lightning_unitscale.capture.side_effects import Calls
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.patching import shadowed

EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")
LIGHTNING_STEPS = ("training_step", *EVALUATION_STEPS)


def passes_table(records: Sequence[PassRecord]) -> str:
    """Format a table of every pass over every graph."""
    rows = [
        (
            record.step,
            record.graph_index,
            "observed" if record.observed else "plain",
            record.pass_name,
            f"{record.nodes_before} -> {record.nodes_after}",
            f"{1e3 * record.seconds:.1f}",
            "\n".join(record.changes),
        )
        for record in records
    ]
    headers = ("step", "graph", "variant", "pass", "nodes", "ms", "changes")
    return tabulate(rows, headers=headers) if rows else "No graph has been captured yet."


def breaks_list(graph_breaks: Sequence[str]) -> str:
    """List the graph breaks with their reasons, each once."""
    breaks = list(dict.fromkeys(graph_breaks))
    if not breaks:
        return "No graph breaks."
    lines = "\n".join(f"  {reason}" for reason in breaks)
    return f"{len(breaks)} graph breaks:\n{lines}\n  (TORCH_LOGS=graph_breaks shows more of each)"


def steps_of(module: nn.Module) -> ModuleSteps | None:
    """Return the captured steps of a module, or ``None`` if nothing was attached to it."""
    return module.__dict__.get(ATTRIBUTE)


class ModuleSteps(ModuleState):
    """Captured steps of one module with the passes that they share."""

    def __init__(
        self,
        module: nn.Module,
        step_names: Sequence[str],
        *,
        defer: Sequence[str] = (),
        untraced: Callable[[nn.Module], Calls] = lambda _: (),
    ) -> None:
        super().__init__(module, defer, untraced)
        self.owners: list[str] = []
        self._put = ExitStack()
        self._shadowed = {
            name: module.__dict__[name] for name in step_names if name in module.__dict__
        }
        self.steps = {name: CapturedStep(self, name, self.original(name)) for name in step_names}

    def attach(self, owner: str) -> None:
        """Install the captured steps on the module. Other owners may call this again."""
        if owner not in self.owners:
            self.owners.append(owner)
        if not self.is_attached:
            self._put.enter_context(unmarked(self.module))
            self._put.enter_context(shadowed(self.module, **{ATTRIBUTE: self}, **self.steps))

    def keep(self, context: AbstractContextManager[Any]) -> None:
        """Stay within a context until the last owner detaches the steps."""
        self._put.enter_context(context)

    def detach(self, owner: str, *passes: GraphPass) -> None:
        """Remove the owner's passes. The last owner restores the module. Idempotent."""
        if owner in self.owners:
            self.owners.remove(owner)
        self.passes = [graph_pass for graph_pass in self.passes if graph_pass not in passes]
        self._observers.discard(owner)
        if not self.owners:
            self._put.close()
            self.reset()

    def add_pass(self, graph_pass: GraphPass) -> None:
        """Add a pass. Every graph is recaptured before its next run."""
        self.passes.append(graph_pass)
        self.reset()

    def use_executor(self, executor: Executor, mode: CompileMode | None = None) -> None:
        """Run the graphs by another executor from now on."""
        mode = mode or self.compile_mode
        if (executor, mode) != (self.executor, self.compile_mode):
            self.executor, self.compile_mode = executor, mode
            self.reset()

    def see_uncaptured(self, read: Sequence[Tensor], *, in_step: bool) -> None:
        """Let the passes check the operands of a matmul outside the graphs."""
        if not any(one.is_rehearsing for one in self.steps.values()):
            for graph_pass in self.passes:
                graph_pass.see_uncaptured(self.module, read, in_step=in_step)

    def partition_by(self, partition_fn: Any) -> None:
        """Split forward and backward graphs by ``partition_fn`` from now on, or as torch does."""
        self.partition_fn = partition_fn
        # The eager executor leaves that to autograd.
        if partition_fn is not None and self.executor == "eager":
            self.executor = "aot_eager"
        elif partition_fn is None and self.executor == "aot_eager":
            self.executor = "eager"
        self.reset()

    def rewrite_by(self, rewriter: GraphRewriter | None) -> None:
        """Rewrite AOTAutograd's graphs from now on, or leave them unchanged."""
        self.rewriter = rewriter
        self.reset()

    def reset(self) -> None:
        """Forget every captured graph."""
        self.records.clear()
        self.graph_breaks.clear()
        for step in self.steps.values():
            step.reset()

    def original(self, name: str) -> Callable[..., Any]:
        """Return the user's own method, unwrapped."""
        if name in self._shadowed:
            return self._shadowed[name]
        return getattr(type(self.module), name).__get__(self.module)

    def explain(self) -> str:
        """Format a table of every pass over every graph, and the graph breaks with reasons."""
        parts = [passes_table(self.records), breaks_list(self.graph_breaks)]
        parts += [text for graph_pass in self.passes if (text := graph_pass.report())]
        return "\n\n".join(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleSteps:
        """Return a copy for the copied module, with the same passes and nothing captured yet."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        vars(new).update(
            vars(self), records=[], graph_breaks=[], owners=list(self.owners), _put=ExitStack()
        )
        new.is_running = False
        new.rewriter = None  # set by the copy's own session, if it gets one
        new._observers = set(self._observers)
        for name in ("module", "partition_fn", "passes", "_shadowed"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        new.steps = {name: CapturedStep(new, name, new.original(name)) for name in self.steps}
        for name, step in self.steps.items():
            memo[id(step)] = new.steps[name]
        for name, step in self.steps.items():
            new.steps[name].before_call = copy.deepcopy(step.before_call, memo)
        if self.is_attached:
            # The module's copy may be only an empty shell yet.
            vars(new.module).update(new._shadowed)
            new._put.enter_context(shadowed(new.module, **{ATTRIBUTE: new}, **new.steps))
        return new

    def __reduce__(self) -> Any:
        raise self.not_to_be_pickled(next(iter(self.steps)))


_STATE = "_compiling_state_context"
MATMULS = "_module_matmuls"
TRACKER = "_scale_tracker"  # hooks and wrappers that observe the calls of a module


def captured_forward(
    module: nn.Module, owner: str, *passes: GraphPass
) -> tuple[nn.Module, CapturedStep]:
    """Deep-copy ``module`` with its own parameters, and run its ``forward`` as captured graphs."""
    new = own_copy(module)
    steps = capture(new, owner, passes)
    return new, steps.steps["forward"]


def own_copy(module: nn.Module) -> nn.Module:
    """Deep-copy ``module`` with its own parameters and the hooks on them."""
    reject_compiled(module)
    memo: dict[int, Any] = {}
    new: nn.Module = detached_copy(module, memo)
    for parameter in new.parameters():
        if not parameter.is_leaf:
            # torch's copy of a scripted module has already computed them.
            parameter.detach_().requires_grad_()
    for parameter in module.parameters():
        hook: Any
        for hook in (parameter._backward_hooks or {}).values():
            if getattr(hook, "__torch_unserializable__", False):
                continue  # the owner of the hook puts one on the copy
            # The hook may be a method of an object in the module.
            owner = memo.get(id(getattr(hook, "__self__", None)))
            copied = hook if owner is None else MethodType(hook.__func__, owner)
            memo[id(parameter)].register_hook(copied)
    return new


def matmuls_of(module: nn.Module) -> Any:
    """Return the object that runs the matmuls of a transformed module, or ``None``."""
    return module.__dict__.get(MATMULS)


def reject_compiled(module: nn.Module, more: str = " and pass compile=True here instead") -> None:
    """Refuse an object that is not a module, or a module that the user has compiled."""
    check_instance("module", module, nn.Module, "a torch.nn.Module", "pass the model itself")
    if is_compiled(module):
        raise ValueError(
            f"module={type(module).__name__}: it is compiled already. Expected an uncompiled one. "
            f"Leave out your torch.compile{more}."
        )


def capture(module: nn.Module, owner: str, passes: tuple[GraphPass, ...] = ()) -> ModuleSteps:
    """Capture ``forward``. Units and formats are applied around it."""
    matmuls, tracker = matmuls_of(module), module.__dict__.get(TRACKER)
    for each in (matmuls, tracker):
        if each is not None:
            each.detach()
    steps = steps_of(module)
    if steps is None:
        steps = ModuleSteps(module, ("forward",))
    for graph_pass in passes:
        steps.add_pass(graph_pass)
    steps.attach(owner)
    if matmuls is not None:
        matmuls.attach_again()
    if tracker is not None:
        tracker.capture(steps)
    set_explain(module)
    return steps


def set_explain(module: nn.Module) -> None:
    """Give a module the method ``explain()``."""
    module.__dict__["explain"] = MethodType(explain_forward, module)


def explain_forward(module: nn.Module) -> str:
    """Describe the captured graphs, the scaled and rounded matmuls, and the passes."""
    # As a method of the module it is `module.explain()`. A copy of the module explains itself.
    matmuls, steps = matmuls_of(module), steps_of(module)
    parts = [one.explain() for one in (matmuls, steps) if one is not None]
    return "\n\n".join(parts) or "Nothing is captured: forward runs uncaptured."


def export_forward(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    expand: bool = True,
    attentions: Mapping[str, bool] = MappingProxyType({}),
    plain: bool = False,
) -> fx.GraphModule:
    """Export ``module.forward`` as a graph module with its signature and a step's node names."""

    def trace() -> fx.GraphModule:
        exported: fx.GraphModule = _export_to_torch_ir(module, args, kwargs)
        return exported

    try:
        graph_module = _trace_as_if_plain(trace, module, args, kwargs) if plain else trace()
    except Exception as error:
        raise CaptureError.of(
            f"{type(module).__name__}.forward", [reason_raised(error)], manner=" as one graph"
        ) from (error if wants_dynamos_texts() or not is_of_dynamo(error) else None)
    Names().assign(CapturedGraph(graph_module, (), 0, ()), graph_module)
    if expand:
        expand_composites(graph_module, attentions)
    make_out_of_place(graph_module.graph)
    return graph_module


def _trace_as_if_plain(
    trace: Callable[[], fx.GraphModule],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> fx.GraphModule:
    """Trace a call. If that fails, run the call and trace it again."""
    with _as_if_plain():
        try:
            return trace_one_graph(trace)
        except Exception as error:
            if not is_of_dynamo(error):
                raise
        set_up_by(lambda: module(*args, **kwargs), module)
        return trace_one_graph(trace)


@contextlib.contextmanager
def _as_if_plain() -> Iterator[None]:
    """Make an export answer traced code that nothing is exported."""
    # Hugging Face's models pass attention an explicit mask when exported, and so use another
    # kernel, with other bits, than in a run.
    usual = getattr(functional_export, _STATE)

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        with usual():
            torch.compiler._is_exporting_flag = False
            yield

    not_exporting = shadowed(functional_export, **{_STATE: compiling})
    with not_exporting, plain_libraries(), warnings.catch_warnings():
        # This is transformers' collector of hidden states, which is set and reset in every call.
        collector = r"(?s)While compiling, we found certain side effects.*_active_collector"
        warnings.filterwarnings("ignore", collector)
        yield
