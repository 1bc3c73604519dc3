"""Let a backward graph read inputs of its forward graph as an uncaptured backward pass does.

A captured step saves a parameter for its backward pass. Code may then write into the parameter
before the backward pass runs: an average of weights in ``on_before_zero_grad``, or
``param.data = ...``. What an uncaptured step sees of that depends on what it saved:

- a view, such as the transposed weight of a linear layer: the memory of the forward pass;
- the parameter itself, such as a convolution's weight: the new memory;
- a result computed from it: nothing of the write. A plan computes that result again.

Here the backward graph gets the same. It reads views through a view that the forward graph saved,
and computes results again from an alias that keeps its numbers: within :class:`KeepingHeld` they
are copied before a write, and elsewhere such a write is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

from lightning_unitscale.capture.aliasing import is_view
from lightning_unitscale.capture.aot_backend import written_by
from lightning_unitscale.capture.fake_device import DispatchMode
from lightning_unitscale.capture.graph_nodes import first_operation

aten = torch.ops.aten
_ATTRIBUTE = "_lightning_unitscale_held"


class HeldInput:
    """The numbers of an input that a backward pass computes with again."""

    def __init__(self, source: Tensor, alias: Tensor) -> None:
        self.source = source
        self.version = version_of(source)
        self.alias = TensorWeakRef(alias)
        self.is_copied = False

    def keep(self, written: Tensor) -> None:
        """Copy the numbers if a write is about to change them."""
        alias = self.alias()
        if alias is None or self.is_copied or not _share_memory(alias, written):
            return
        alias.data = alias.clone()
        self.is_copied = True


_LIVE: weakref.WeakSet[HeldInput] = weakref.WeakSet()


def holds_inputs() -> bool:
    """Check whether any backward pass is still to come that needs the numbers of an input."""
    return bool(_LIVE)


def hold(source: Tensor) -> Tensor:
    """Return an alias of an input, which keeps the input's memory and may get its own."""
    # Unlike ``detach()``, it shares no version counter: the source may be written.
    alias = source.data
    held = HeldInput(source, alias)
    setattr(alias, _ATTRIBUTE, held)  # it lives as long as the alias is saved
    _LIVE.add(held)
    return alias


def held(alias: Tensor) -> Tensor:
    """Return the numbers of the forward pass, in the backward pass."""
    found: HeldInput | None = getattr(alias, _ATTRIBUTE, None)
    if found is None or found.is_copied or version_of(found.source) == found.version:
        return alias
    shape = "x".join(map(str, alias.shape)) or "without dimensions"
    raise RuntimeError(
        f"A {alias.dtype} tensor ({shape}) was written in place between the forward and the "
        "backward pass of a captured step. The backward pass computes values again from the "
        "numbers before the write. Write after the backward pass, or leave out the memory budget."
    )


class _SeeingWrites(DispatchMode):
    """Mode that sees the tensors that operations are about to write into."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that the user compiled run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func._schema.is_mutable:
            for tensor in written_by(func, args, options):
                self.before_write(tensor)
        return func(*args, **options)

    def before_write(self, tensor: Tensor) -> None:
        """Handle a tensor before it is written."""
        raise NotImplementedError


class KeepingHeld(_SeeingWrites):
    """Mode that copies the numbers that backward passes need before they are written."""

    @override
    def before_write(self, tensor: Tensor) -> None:
        keep_before_write(tensor)


class WriteProtected(_SeeingWrites):
    """Mode in which an operation that writes into a module's parameters raises an error instead."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = list(module.parameters())

    @override
    def before_write(self, tensor: Tensor) -> None:
        if any(_share_memory(tensor, parameter) for parameter in self._parameters):
            raise RuntimeError("an operation would write into a parameter")


def keep_before_write(tensor: Tensor) -> None:
    """Copy what backward passes need of a tensor that is about to be written."""
    for one in list(_LIVE):
        one.keep(tensor)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written into. Inference tensors do not count writes."""
    return 0 if tensor.is_inference() else tensor._version


def _share_memory(first: Tensor, second: Tensor) -> bool:
    try:
        return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass without storage
        return False


def hold_inputs(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> None:
    """Save views and aliases of inputs instead of the inputs, in both graphs of a step."""
    outputs = cast("Sequence[Any]", forward.output_node().args[0])
    saved = {node.name for node in outputs[num_outputs:] if node is not None}
    given = {node.name: node for node in forward.find_nodes(op="placeholder")}
    for node in backward.find_nodes(op="placeholder"):
        source = given.get(node.name)
        if source is not None and node.name in saved and _may_be_written(source):
            _SavedInput(forward, backward, source, node, num_outputs).split()


def _may_be_written(source: fx.Node) -> bool:
    value = source.meta.get("val")
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    # Results that the graph itself writes are not recomputed.
    return is_dense and not any(
        getattr(getattr(user.target, "_schema", None), "is_mutable", False) for user in source.users
    )


class _SavedInput:
    """One input of a forward graph that its backward graph reads."""

    def __init__(
        self, forward: fx.Graph, backward: fx.Graph, source: fx.Node, given: fx.Node, count: int
    ) -> None:
        self.forward, self.backward, self.source, self.given = forward, backward, source, given
        self.num_outputs = count
        self.views = [given]  # the input, and its views that the forward pass makes
        for view in self.views:
            self.views += [user for user in view.users if is_view(user) and not _is_backward(user)]

    def split(self) -> None:
        """Give each kind of reader the values that it reads in an uncaptured pass."""
        again, viewed = [], []
        for view in self.views:
            for user in view.users:
                if user in self.views or user.op == "output":
                    continue
                if not _is_backward(user):
                    again.append((view, user))
                elif view is not self.given:
                    viewed.append((view, user))
        if viewed:
            self._read_through(self._saved(aten.alias.default, "viewed"), viewed)
        if again:
            root = self._saved(hold, "held")
            with self.backward.inserting_before(first_operation(self.backward)):
                numbers = self.backward.call_function(held, (root,))
            numbers.meta = dict(root.meta)
            self._read_through(numbers, again)
        for view in reversed(self.views[1:]):
            if not view.users:
                self.backward.erase_node(view)
        if not self.given.users:
            self._drop()

    def _saved(self, target: Any, name: str) -> fx.Node:
        """Save a function's result for the input, next to the input."""
        with self.forward.inserting_after(self.forward.find_nodes(op="placeholder")[-1]):
            new = self.forward.call_function(target, (self.source,), name=f"{self.source}_{name}")
        new.meta = {key: value for key, value in self.source.meta.items() if key != "desc"}
        with self.backward.inserting_after(self.given):
            placeholder = self.backward.placeholder(new.name)
        placeholder.meta = dict(self.given.meta)
        self._replace_in_outputs(self.source, new)
        return placeholder

    def _drop(self) -> None:
        self._replace_in_outputs()
        self.backward.erase_node(self.given)

    def _replace_in_outputs(self, *nodes: fx.Node) -> None:
        """Save other nodes in place of the input, with its description."""
        output = self.forward.output_node()
        outputs = list(cast("Sequence[Any]", output.args[0]))
        place = outputs.index(self.source, self.num_outputs)
        outputs[place : place + 1] = nodes
        output.args = (tuple(outputs),)
        if (descriptions := output.meta.get("desc")) is not None:
            descriptions = list(descriptions)
            descriptions[place : place + 1] = [descriptions[place]] * len(nodes)
            output.meta["desc"] = descriptions

    def _read_through(self, root: fx.Node, reads: list[tuple[fx.Node, fx.Node]]) -> None:
        """Let some nodes read views of ``root`` instead of the same views of the input."""
        copies = {self.given: root}
        for view in self.views[1:]:
            if any(view is read or self._leads_to(view, read) for read, _ in reads):
                with self.backward.inserting_after(view):
                    copies[view] = self.backward.node_copy(view, lambda arg: copies.get(arg, arg))
        for read, user in reads:
            user.replace_input_with(read, copies[read])

    def _leads_to(self, view: fx.Node, read: fx.Node) -> bool:
        return any(
            user is read or self._leads_to(user, read) for user in view.users if user in self.views
        )


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
