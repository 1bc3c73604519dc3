"""A module's ``forward`` as one graph of flat inputs and outputs: what the pipeline cuts."""

from __future__ import annotations

import contextlib
import inspect
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten

from lightning_unitscale.graph.aliasing import memory_roots, written_arguments
from lightning_unitscale.graph.capture import is_compiled
from lightning_unitscale.graph.exported import export_forward
from lightning_unitscale.graph.nodes import MODULE, NAME, example_tensor, tensor_name
from lightning_unitscale.pipeline.loss import LossSpec, LossWrapper, loss_index
from lightning_unitscale.shadowing import shadowed

# What a captured graph can return.
_RETURNABLE = (Tensor, int, float, bool, str, type(None), tuple, list)


@dataclass(frozen=True)
class TensorInfo:
    """Shape, type and layout of a tensor.

    Attributes:
        shape: Sizes of the dimensions.
        stride: Steps between elements.
        dtype: Type of the elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """The description of a tensor, fake ones too."""
        return cls(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, each once."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class ProgramInput:
    """One leaf of a program's arguments.

    Attributes:
        name: Where it is in the arguments, such as ``input_ids`` or ``batch[0]``.
        tensor: What the graph was captured for, if it is a tensor.
        value: The value that the graph was captured for, if it is no tensor.
    """

    name: str
    tensor: TensorInfo | None = None
    value: Any = None


@dataclass(frozen=True)
class Program:
    """One graph with parameters and buffers under their names, and flat inputs and outputs.

    Attributes:
        graph_module: The graph. Its placeholders are the inputs in their order, its output is a
            tuple; parameters, buffers and constants are ``get_attr`` nodes.
        inputs: What the placeholders are.
        in_spec: Structure of ``(args, kwargs)``.
        out_spec: Structure of the result.
        loss: Position of the loss among the flat outputs.
        left_out: Outputs of the module that no graph can return.
    """

    graph_module: fx.GraphModule
    inputs: tuple[ProgramInput, ...]
    in_spec: TreeSpec
    out_spec: TreeSpec
    loss: int | None
    left_out: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Nodes and constants that are returned."""
        returned: Any = self.graph_module.graph.output_node().args[0]
        return tuple(returned)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat inputs of a call.

        Raises:
            ValueError: If the call has another structure than the example, or other values that
                are no tensors: those are part of the graph.
        """
        # The order of keyword arguments carries no meaning.
        template = tree_unflatten(list(range(len(self.inputs))), self.in_spec)
        names = list(template[1])
        ordered = {name: kwargs[name] for name in names if name in kwargs}
        ordered |= {name: value for name, value in kwargs.items() if name not in ordered}
        flat, spec = tree_flatten((tuple(args), ordered))
        if spec != self.in_spec:
            wanted = [one.name for one in self.inputs]
            raise ValueError(
                f"arguments: {len(args)} positional and {list(kwargs)} by name have another "
                "structure than the example that the pipeline was captured with; expected "
                f"{wanted} in the same places; call it as in pipeline(...)."
            )
        for given, one in zip(flat, self.inputs, strict=True):
            if one.tensor is None and (isinstance(given, Tensor) or given != one.value):
                raise ValueError(
                    f"{one.name}={given!r}: the pipeline was captured for {one.value!r}, which is "
                    "part of its graph; expected the same value; capture another pipeline for "
                    "other values."
                )
        return flat

    def check(self, flat: list[Any]) -> None:
        """Check the tensors of a call against the example's.

        Raises:
            ValueError: Naming the first that has another shape or type.
        """
        for given, one in zip(flat, self.inputs, strict=True):
            if one.tensor is None:
                continue
            if not isinstance(given, Tensor):
                raise ValueError(f"{one.name}={given!r}: expected a tensor {one.tensor}.")
            if tuple(given.shape) != one.tensor.shape or given.dtype != one.tensor.dtype:
                raise ValueError(
                    f"{one.name}: a tensor {TensorInfo.of(given)}; expected {one.tensor}, for "
                    "which the pipeline was captured: shapes are part of its graph; capture "
                    "another pipeline for other shapes."
                )

    def unflatten(self, outputs: list[Any]) -> Any:
        """The result in the module's own structure."""
        return tree_unflatten(outputs, self.out_spec)


def capture_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss_spec: LossSpec = None,
) -> Program:
    """Capture ``module.forward`` for example arguments. Nothing is computed.

    Raises:
        ValueError: If the module is compiled, has a parameter without a shape, or writes into an
            input, or ``loss_spec`` fits nothing.
        RuntimeError: If ``forward`` cannot be captured as one graph.
    """
    _check_module(module)
    args, kwargs = _distinct((tuple(args), dict(kwargs)))
    left_out: list[str] = []
    with _returnable(module, left_out):
        graph_module = export_forward(module, args, dict(kwargs), expand=False, plain=True)
    graph = graph_module.graph
    structure = graph._codegen.pytree_info  # type: ignore[attr-defined]
    in_spec, out_spec = structure.in_spec, structure.out_spec
    graph.set_codegen(fx.graph.CodeGen())
    inputs = _describe(module, args, kwargs)
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise RuntimeError(
            f"{type(module).__name__}: its graph has {len(placeholders)} inputs where the call has "
            f"{len(inputs)}; expected tensors and plain values as arguments; pass tensors."
        )
    _name_by_origin(graph)
    _refuse_written_inputs(module, graph)
    outputs: Any = graph.output_node().args[0]
    structured = tree_unflatten(list(outputs), out_spec)
    scalars = [_can_be_loss(one) for one in outputs]
    whole = isinstance(module, LossWrapper)
    loss = loss_index(structured, scalars, loss_spec, whole=whole)
    left_out = list(dict.fromkeys(left_out))
    if left_out:
        warnings.warn(
            f"{type(module).__name__}: its outputs {left_out} are no tensors and are left out of "
            "the pipeline's results; expected tensors and containers of them; switch them off "
            "(use_cache=False) to silence this.",
            stacklevel=3,
        )
    return Program(graph_module, inputs, in_spec, out_spec, loss, tuple(left_out))


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r}: expected an nn.Module.")
    if is_compiled(module):
        raise ValueError(
            f"module={type(module).__name__}: it is compiled already; expected a plain module; "
            "leave out your torch.compile."
        )
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"module={type(module).__name__}: its parameter {name} has no shape yet; expected "
                "initialized parameters; call the module once on an example before."
            )


def _distinct(value: Any) -> Any:
    """One tensor given twice (``labels=input_ids``) would be captured as one input."""
    flat, spec = tree_flatten(value)
    seen: set[int] = set()
    for place, one in enumerate(flat):
        if isinstance(one, Tensor):
            if id(one) in seen:
                flat[place] = one.detach().clone().requires_grad_(one.requires_grad)
            seen.add(id(one))
    return tree_unflatten(flat, spec)


def _describe(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[ProgramInput, ...]:
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        names = []
    found = []
    for path, value in tree_flatten_with_path((args, dict(kwargs)))[0]:
        entries: tuple[Any, ...] = path
        side, first, *rest = entries
        name = first.key if side.idx else f"argument {first.idx}"
        if not side.idx and first.idx < len(names):
            name = names[first.idx]
        name = f"{name}{''.join(str(one) for one in rest)}"
        if isinstance(value, Tensor):
            found.append(ProgramInput(name, tensor=TensorInfo.of(value)))
        else:
            found.append(ProgramInput(name, value=value))
    return tuple(found)


@contextlib.contextmanager
def _returnable(module: nn.Module, left_out: list[str]) -> Iterator[None]:
    """Within this context ``forward`` leaves out of a mapping what no graph can return.

    Hugging Face models return a cache object by default, which is of no use in training.
    """
    if "forward" in module.__dict__:
        yield
        return

    # Called while Dynamo traces: what traced code appends to a list is lost in an export.
    @torch.compiler.assume_constant_result
    def leave_out(key: str) -> bool:
        left_out.append(key)
        return True

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = type(self).forward(self, *args, **kwargs)
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

    with shadowed(module, forward=types.MethodType(forward, module)):
        yield


def _name_by_origin(graph: fx.Graph) -> None:
    """Module paths without the step through our ``forward``; attributes under their own names."""
    for node in graph.nodes:
        for key in (MODULE, NAME):
            if key in node.meta:
                node.meta[key] = str(node.meta[key]).removeprefix("forward.")
        if node.meta.get(MODULE) == "forward":
            node.meta[MODULE] = ""
        if node.op == "get_attr":
            node.meta[NAME] = str(node.target)


def _refuse_written_inputs(module: nn.Module, graph: fx.Graph) -> None:
    roots = memory_roots(graph)
    for node in graph.nodes:
        for target in written_arguments(node):
            if roots[target].op == "placeholder":
                raise ValueError(
                    f"{type(module).__name__}: {tensor_name(node)} writes into the argument "
                    f"{tensor_name(roots[target])}; expected a forward that leaves its arguments "
                    "as they are: every stage reads its own copy; clone the argument first."
                )


def _can_be_loss(value: object) -> bool:
    tensor = example_tensor(value)
    return (
        tensor is not None
        and tensor.numel() == 1
        and tensor.is_floating_point()
        and tensor.requires_grad
    )
