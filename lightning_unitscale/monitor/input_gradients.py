"""Measure the gradients of a watched step, also of tensors outside of its backward pass.

A tensor that takes no part in the backward pass, such as a batch, has no gradient in the step, and
the step does not change. Each function that reads such a tensor also runs a second time, on
copies, with a separate autograd graph. This graph ends in tensors that take part in the backward
pass. Their gradients are kept, and sent through the second graph when the backward pass ends.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.capture.held_inputs import version_of
from lightning_unitscale.matmuls.autograd_nodes import after_backward, autograd_operations
from lightning_unitscale.matmuls.calls import leave_graph
from lightning_unitscale.matmuls.session import run_inside
from lightning_unitscale.matmuls.sites import frames
from lightning_unitscale.matmuls.torch_internals import function_call, graph_task
from lightning_unitscale.monitor.rows import Measuring, TensorRow
from lightning_unitscale.monitor.torch_state import (
    OPERATORS,
    PLAIN_TYPES,
    is_batched,
    is_readable,
    unseen,
)
from lightning_unitscale.patching import nothing


class _GradientHook:
    """A hook that measures the gradient of one output of a node."""

    __slots__ = ("_before", "_index", "_measuring", "_row")

    def __init__(
        self, measuring: Measuring, row: TensorRow, index: int, before: Callable[[], object]
    ) -> None:
        self._measuring, self._row, self._index, self._before = measuring, row, index, before

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        """Measure the gradient, if it has arrived and has statistics."""
        gradient = gradients[self._index]
        # A backward pass that is itself differentiated belongs to the step's forward pass.
        if gradient is None or torch.is_grad_enabled():
            return
        if is_readable(gradient) or gradient.is_sparse:
            self._before()
            self._measuring.gradient(self._row, gradient)


class Gradients:
    """The measurement of gradients when they are complete, before the backward pass continues."""

    # Hooks are on the autograd node, since the tensor belongs to the user. They run after all hooks
    # of the tensor itself, whatever their order.

    def __init__(self, measuring: Measuring) -> None:
        self._measuring = measuring
        self.hooks: list[RemovableHandle] = []
        # A parameter does not keep its node alive. Only the graphs that have read it do.
        self._leaf_nodes: dict[int, Any] = {}

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Create the autograd nodes of parameters, as a step does when it reads them."""
        # Creating them within the step would change the numbers of all later nodes, which identify
        # the matmuls of a backward pass.
        # A helper may read a parameter in inference mode before the model does.
        with unseen(), torch.inference_mode(False), torch.enable_grad():
            for leaf in parameters:
                if leaf.requires_grad and not is_lazy(leaf) and is_readable(leaf):
                    node: Any = leaf.grad_fn
                    if node is None:  # the way get_gradient_edge() finds it
                        node = leaf.view_as(leaf).grad_fn
                        node = node.next_functions[0][0]
                    self._leaf_nodes[id(leaf)] = node

    def measure(
        self, row: TensorRow, tensor: Tensor, before: Callable[[], object] = nothing
    ) -> None:
        """Measure the gradient of a tensor into its row."""
        row.is_hooked = True
        node, index = tensor.grad_fn, tensor.output_nr
        if node is None:
            node = self.leaf_node(tensor)

        hook = _GradientHook(self._measuring, row, index, before)
        self.hooks.append(node.register_prehook(hook))

    def close(self) -> None:
        """Stop measuring gradients."""
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()
        self._leaf_nodes.clear()

    def leaf_node(self, leaf: Tensor) -> Any:
        """Return the autograd node of a leaf."""
        if id(leaf) not in self._leaf_nodes:
            with unseen(), torch.inference_mode(False):
                edge: Any = get_gradient_edge(leaf)
            self._leaf_nodes[id(leaf)] = edge.node
        return self._leaf_nodes[id(leaf)]


@dataclass(eq=False)
class GradientPath:
    """The path of a gradient to a tensor that takes no part in the backward pass."""

    tensor: Tensor  # its stand-in in the second graph
    version: int  # number of writes into it at that time
    parents: tuple[GradientPath, ...] = ()  # the paths of its inputs
    is_lost: bool = False  # whether a function with an unknown gradient has read it

    def lose(self) -> None:
        """Mark its gradient, and the gradients of its inputs, as incomplete."""
        pending = [self]
        while pending:
            path = pending.pop()
            if not path.is_lost:
                path.is_lost = True
                pending += path.parents


class InputGradients:
    """The second graph of a call."""

    def __init__(self, leaf_node: Callable[[Tensor], Any]) -> None:
        self._leaf_node = leaf_node
        self._paths: Any = WeakIdKeyDictionary()
        self._lost: Any = WeakIdKeyDictionary()  # tensors that were read before they had a path
        # Keyed by the number of the backward pass, because a pass may fail before its end.
        self._arrived: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._handles: list[RemovableHandle] = []

    def start(self, tensor: Tensor) -> GradientPath:
        """Begin a path at an input."""
        leaf = tensor.detach().requires_grad_()
        path = GradientPath(leaf, version_of(tensor), is_lost=tensor in self._lost)
        self._paths[tensor] = path
        return path

    def path_of(self, tensor: Tensor) -> GradientPath | None:
        """Return the path of a tensor, if it has one."""
        path: GradientPath | None = self._paths.get(tensor)
        if path is not None and path.version != version_of(tensor):
            path.lose()  # written into, perhaps through a view
            del self._paths[tensor]
            return None
        return path

    def lose(self, tensors: Iterable[Tensor]) -> None:
        """Mark the gradients of tensors as unknown."""
        for tensor in tensors:
            if (path := self.path_of(tensor)) is not None:
                path.lose()
            else:
                self._lost[tensor] = True

    def run_beside(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Beside | None:
        """Run a function in the second graph, before it runs in the step."""
        tensors = tensors_in((args, kwargs))
        paths = {id(t): path for t in tensors if (path := self.path_of(t)) is not None}
        if not torch.is_grad_enabled():
            # An autograd function defines its own derivative.
            if any(function_call(frame) is not None for frame in frames()):
                self.lose(tensors)
            return None
        if not paths:
            return None
        beside = _Beside(tuple(dict.fromkeys(paths.values())), tensors)
        is_torch = not isinstance(function, FunctionType) or function.__module__.startswith("torch")
        # A user's own operator may have side effects.
        if is_torch and not isinstance(function, OPERATORS) and all(map(_is_plain, tensors)):
            # Some arguments, such as the class weights of a loss, may have no gradient.
            for without in (None, *beside.parents):
                read = {key: path for key, path in paths.items() if path is not without}
                with contextlib.suppress(Exception), _isolated():
                    run_inside(beside.run, function, args, kwargs, read)
                    if without is not None:
                        without.lose()
                    break
        return beside

    def follow(
        self, beside: _Beside, arguments: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Assign the paths of the second run to the results of a function in the step."""
        known = {id(tensor) for tensor in results}
        written = [
            tensor
            for tensor in arguments
            if id(tensor) not in known and beside.versions[id(tensor)] != version_of(tensor)
        ]
        twins = [*beside.results, *(beside.twins.get(id(tensor)) for tensor in written)]
        if len(beside.results) != len(results):
            twins = [None] * (len(results) + len(written))
        for tensor, twin in zip((*results, *written), twins, strict=True):
            if twin is None or not twin.requires_grad:
                # A result without a derivative, such as an index, loses no gradient.
                if twin is None and (tensor.is_floating_point() or tensor.is_complex()):
                    for parent in beside.parents:
                        parent.lose()
                continue
            path = GradientPath(twin, version_of(tensor), beside.parents)
            if tensor.requires_grad:
                self._paths.pop(tensor, None)
                self._end(path, tensor)
            else:
                self._paths[tensor] = path

    def rejoin(self, tensor: Tensor) -> None:
        """End the path of a tensor that now takes part in the backward pass, if it has one."""
        path = self.path_of(tensor)
        if path is not None:
            del self._paths[tensor]
            self._end(path, tensor)

    def arrive(self, tensor: Tensor, gradient: Tensor) -> None:
        """Keep a gradient until the backward pass ends."""
        task = graph_task()
        if task not in self._arrived:
            self._arrived[task] = []
            after_backward(functools.partial(self._send, task))
        self._arrived[task].append((tensor, gradient.detach()))

    def close(self) -> None:
        """Stop following gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _end(self, path: GradientPath, tensor: Tensor) -> None:
        """Send the gradient that arrives at a tensor of the step through its path."""
        node, index = tensor.grad_fn or self._leaf_node(tensor), tensor.output_nr

        def see(gradients: Sequence[Tensor | None]) -> None:
            gradient = gradients[index]
            # Batched gradients of ``torch.autograd.grad`` have no statistics.
            if gradient is None or is_batched(gradient):
                return
            if torch.is_grad_enabled():
                path.lose()  # the gradient may be read, and lead here once more
            else:
                self.arrive(path.tensor, gradient)

        self._handles.append(node.register_prehook(see))

    def _send(self, task: int) -> None:
        tensors, gradients = zip(*self._arrived.pop(task), strict=True)
        with contextlib.suppress(RuntimeError), _isolated():
            run_inside(torch.autograd.backward, tensors, gradients, retain_graph=True)


class _Beside:
    """One run of a function in the second graph."""

    def __init__(self, parents: tuple[GradientPath, ...], arguments: Iterable[Tensor]) -> None:
        self.parents = parents
        self.versions = {id(tensor): version_of(tensor) for tensor in arguments}
        self.results: list[Tensor] = []
        # Its arguments in the second graph, by the identity of those in the step.
        self.twins: dict[int, Tensor] = {}

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        paths: dict[int, GradientPath],
    ) -> None:
        """Run the function."""
        first = args[0] if args else None
        self.twins.clear()

        def twin(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                raise TypeError("its numbers are those of the step")
            if not isinstance(value, Tensor):
                return value
            if id(value) not in self.twins:
                path, new = paths.get(id(value)), value.detach()
                if path is not None:
                    new = _Value.apply(path.tensor, new)
                elif value is first or not isinstance(value, nn.Parameter):
                    new = new.clone()  # it may be written into
                self.twins[id(value)] = new
            return self.twins[id(value)]

        devices = {tensor.device for tensor in tensors_in((args, kwargs)) if tensor.is_cuda}
        # The step draws the same random numbers again.
        with torch.random.fork_rng(devices):
            self.results = tensors_in(function(*tree_map(twin, args), **tree_map(twin, kwargs)))
        made: set[Any] = {tensor.grad_fn for tensor in self.results} - {None}
        sources = [source for node in made for source, _ in node.next_functions]
        begin = {tensor.grad_fn for tensor in self.twins.values()}
        if not made.isdisjoint(autograd_operations(sources, begin)):
            # The step has the total gradient of a result, including the part that arrived through
            # another result.
            raise ValueError("one result was computed from another")
        for tensor in (*self.results, *self.twins.values()):
            leave_graph(tensor.grad_fn)


class _Value(torch.autograd.Function):
    """The value of a tensor of the step, at the end of its path."""

    @staticmethod
    def forward(ctx: Any, path: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Hide the computations of this context from the step's modes, hooks and warnings."""
    # A checkpoint counts saved tensors, so these are not shown to it. A detached tensor does not
    # keep itself alive.
    kept = saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
    with unseen(), torch.enable_grad(), kept, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
