"""Run or compile the graphs that AOTAutograd makes, with the kernels of an uncaptured step.

Interpolation, some losses and dropout have Python decompositions registered for autograd's dispatch
key. A traced joint graph always gets these. They add up in another order than the kernels of an
uncaptured step, so losses and gradients would differ by an ulp. On a CPU, dropout multiplies by a
mask that is rounded to the type of its input. Its decomposition multiplies by ``1 / (1 - p)``, so
in BF16 the gradients differ in the third digit.

Under autocast AOTAutograd traces the backward pass with autocast on. A ``backward()`` outside of
autocast, such as a Trainer's, runs without it.

``_trilinear``, the kernel of ``nn.Bilinear``, calls ``bmm``. An uncaptured step runs it within
autocast, so in BF16. In a captured graph the kernel is one operation that runs outside of autocast,
so we replace it by an operator that runs within.

Two bugs of torch in recurrent layers are fixed here. Its decomposition of stacked layers never
applies dropout between them: its comparison of their number with a layer's index is reversed. And
oneDNN's LSTM returns the workspace that its backward kernel reads only in grad mode, which is off
while a graph runs (pytorch issue 158007).

AOTAutograd calls its graph with the inputs unchanged. If the class of an input overrides operations
in Python (``__torch_function__``), the checks of the first call raise an error. So such inputs are
passed as ordinary tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._decomp import decompositions
from torch._decomp.decompositions import upsample_compute_output_size
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_unitscale.patching import shadowed


@contextlib.contextmanager
def partitioned_by(partition_fn: Any) -> Iterator[None]:
    """Set Inductor's options for a partitioner. Without a uuid its graphs are not cached."""
    if partition_fn is None:
        yield
        return
    is_cached = partition_fn.uuid() is not None
    in_fx = is_cached and inductor_config.fx_graph_cache
    in_autograd = is_cached and functorch_config.enable_autograd_cache
    with (
        inductor_config.patch(custom_partitioner_fn=partition_fn, fx_graph_cache=in_fx),
        functorch_config.patch(enable_autograd_cache=in_autograd),
    ):
        yield


aten = torch.ops.aten
# Left out: operators that keep the kernel's bits when decomposed (GRUs, nearest neighbors), batch
# norm, whose kernel writes to its running statistics outside autograd, and LSTMs, since the shapes
# of oneDNN's results are unknown until it runs.
_TAKEN_APART = (
    aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
)
_DROPOUTS = {aten.dropout: aten.dropout_, aten.alpha_dropout: aten.alpha_dropout_}
_RESIZED = {
    aten.upsample_linear1d: aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d: aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d: aten.upsample_trilinear3d_backward.default,
    aten.upsample_bicubic2d: aten.upsample_bicubic2d_backward.default,
}
# Their gradients keep the channels-last layout of an image.
_KEEP_LAYOUT = (
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)
_COMPOSITE = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Give a traced graph the kernels that an uncaptured step runs."""
    with contextlib.ExitStack() as stack:
        for operator in _TAKEN_APART:
            stack.enter_context(_with_python_kernel(operator, DispatchKey.Autograd, None))
        for packet, in_place in _DROPOUTS.items():
            drop = functools.partial(_dropped, packet.default)
            drop_in_place = functools.partial(_dropped_in_place, packet.default)
            for key in _COMPOSITE:
                stack.enter_context(_with_python_kernel(packet.default, key, drop))
                stack.enter_context(_with_python_kernel(in_place.default, key, drop_in_place))
        for packet, backward in _RESIZED.items():
            # torch's own C++ function would fix the sizes of a graph that has symbolic sizes.
            resize = functools.partial(_resized, packet.default)
            for key in _COMPOSITE:
                stack.enter_context(_with_python_kernel(packet.vec, key, resize))
            shape = functools.partial(_gradient_of_resized, backward in _KEEP_LAYOUT)
            stack.enter_context(_with_python_kernel(backward, DispatchKey.Meta, shape))
        stack.enter_context(
            _with_python_kernel(aten._trilinear.default, DispatchKey.Autograd, trilinear)
        )
        stack.enter_context(recurrent_dropout())
        yield


def _dropped(operator: OpOverload, input: Tensor, p: float, train: bool) -> Tensor:
    """Run torch's own dropout kernel: a fused one on a GPU, several operations on a CPU."""
    # A CPU's kernel draws in memory order. Its draw is traced in the order of a contiguous tensor.
    # So the kernel gets a tensor whose dimensions are in memory order.
    order = list(range(input.dim()))
    if input.device.type == "cpu" and not input.is_contiguous():
        order = compute_elementwise_output_logical_to_physical_perm(input)[0]
    ordered: Tensor = operator._op_dk(
        DispatchKey.CompositeImplicitAutograd, input.permute(order), p, train
    )
    return ordered.permute([order.index(dim) for dim in range(input.dim())])


def _dropped_in_place(operator: OpOverload, input: Tensor, p: float, train: bool) -> Tensor:
    """Run dropout in place. ``operator`` is the out-of-place one."""
    return input.copy_(_dropped(operator, input, p, train))


def _resized(
    kernel: OpOverload,
    image: Tensor,
    output_size: Any,
    align_corners: bool,
    scale_factors: Any = None,
) -> Any:
    """Resize an image by the kernel that takes sizes, which autograd knows as one operation."""
    size = upsample_compute_output_size(image.size(), output_size, scale_factors)
    return kernel(image, size, align_corners, *(scale_factors or [None] * len(size)))


def _gradient_of_resized(
    keeps_layout: bool, grad: Tensor, output_size: Any, input_size: Any, *_: Any
) -> Tensor:
    """Return the shape of the backward kernel's result, without its numbers."""
    layout = suggest_memory_format(grad) if keeps_layout else torch.contiguous_format
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=layout)


@contextlib.contextmanager
def _with_python_kernel(
    operator: OpOverload, key: DispatchKey, function: Callable[..., Any] | None
) -> Iterator[None]:
    kernels = operator.py_kernels
    before = kernels.pop(key, None)
    if function is not None:
        kernels[key] = function
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        kernels.pop(key, None)
        if before is not None:
            kernels[key] = before
        operator._dispatch_cache.clear()


_LSTM = aten.mkldnn_rnn_layer.default
_WORKSPACE = 3  # the index of the result that only the backward kernel reads


def recurrent_dropout() -> contextlib.AbstractContextManager[None]:
    """Return a context in which traced recurrent layers apply dropout between them."""
    layers = functools.partial(_layer_by_layer, decompositions._rnn_helper)
    return shadowed(decompositions, _rnn_helper=layers)


def _layer_by_layer(
    run: Callable[..., Any],
    input: Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer_fn: Callable[..., Any],
) -> tuple[Tensor, list[Any]]:
    """Run stacked layers one by one, with dropout between them."""
    output = input.transpose(0, 1) if batch_first else input
    finals: list[Any] = []
    directions = 2 if bidirectional else 1
    for start in range(0, num_layers * directions, directions):
        if start and train and dropout:
            output = torch.dropout(output, dropout, train=True)
        layer = slice(start, start + directions)
        options = (has_biases, 1, 0.0, train, bidirectional, False, layer_fn)
        output, final = run(output, hidden[layer], params[layer], *options)
        finals += final
    return output.transpose(0, 1) if batch_first else output, finals


def keep_workspaces(graph: fx.Graph) -> bool:
    """Let LSTMs return the workspaces that a backward pass reads, and return if there are any."""
    results = graph.find_nodes(op="call_function", target=getitem)
    layers = [node.args[0] for node in results if node.args[1] == _WORKSPACE]
    lstms = [layer for layer in layers if layer.target is _LSTM]
    for lstm in lstms:
        lstm.target = lstm_with_workspace()
    return bool(lstms)


@functools.cache
def lstm_with_workspace() -> Any:
    """Return LSTM's operator that keeps its workspace. Creating it takes milliseconds."""
    schema = str(_LSTM._schema).partition("(")[2]

    @torch.library.custom_op(
        "lightning_unitscale::lstm_with_workspace", mutates_args=(), schema=f"({schema}"
    )
    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            return _LSTM(*args)

    run.register_fake(_LSTM)
    return torch.ops.lightning_unitscale.lstm_with_workspace.default


class Writes(TorchDispatchMode):
    """Mode that records random draws, and storages that operators write into by schema."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[torch.UntypedStorage] = set()
        self.has_drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable:
            written = written_by(func, args, options)
            self.storages.update(tensor.untyped_storage() for tensor in written)
        return func(*args, **options)


def written_by(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call of an operator writes into, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else options.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


_KERNEL = torch.ops.aten._trilinear.default


def trilinear(i1: Tensor, i2: Tensor, i3: Tensor, *dims: Any, **options: Any) -> Tensor:
    """Run the kernel as an uncaptured step does. It stands in for the kernel's autograd."""
    device = i1.device.type
    if not torch.is_autocast_enabled(device):
        return _KERNEL._op_dk(DispatchKey.Autograd, i1, i2, i3, *dims, **options)
    return _operator()(i1, i2, i3, *dims[:4], torch.get_autocast_dtype(device))


@functools.cache
def _operator() -> Any:
    """Return the operator. It is created on first use, since that is slow."""

    @torch.library.custom_op("lightning_unitscale::trilinear_within_autocast", mutates_args=())
    def run(
        i1: Tensor, i2: Tensor, i3: Tensor, expand1: Sequence[int], expand2: Sequence[int],
        expand3: Sequence[int], sumdim: Sequence[int], dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        with torch.autocast(i1.device.type, dtype):
            result: Tensor = _KERNEL(i1, i2, i3, expand1, expand2, expand3, sumdim)
        return result

    def shape(i1: Tensor, i2: Tensor, i3: Tensor, *dims: Any) -> Tensor:
        return _KERNEL(i1, i2, i3, *dims[:4])

    run.register_fake(shape)
    run.register_autograd(_gradients, setup_context=_save)
    return run


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.dims = inputs[3:7]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients as torch's own derivative computes them, by the same kernel."""
    i1, i2, i3 = ctx.saved_tensors
    first, second, third, total = ctx.dims
    run = torch.ops.aten._trilinear
    needed = ctx.needs_input_grad
    return (
        run(grad, i2, i3, total, second, third, first) if needed[0] else None,
        run(i1, grad, i3, first, total, third, second) if needed[1] else None,
        run(i1, i2, grad, first, second, total, third) if needed[2] else None,
        *[None] * 5,
    )


_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def on_plain_tensors(run: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs ``run`` on its inputs as ordinary tensors."""
    # Dynamo guards on classes, so the examples show which inputs are of which class.
    positions = [index for index, value in enumerate(examples) if is_python_subclass(value)]
    if not positions:
        return run

    @functools.wraps(run)
    def run_on_plain(*inputs: Any) -> Any:
        plain = list(inputs)
        for index in positions:
            # The new tensor has the same memory, and its gradient reaches the original one.
            plain[index] = plain[index].as_subclass(Tensor)
        return run(*plain)

    return run_on_plain


def is_python_subclass(value: Any) -> bool:
    """Check whether a tensor is of a class that overrides operations in Python."""
    # A parameter may contain one.
    tensor = value.data if isinstance(value, nn.Parameter) else value
    kind = type(tensor)
    return (
        isinstance(tensor, Tensor)
        and kind not in {Tensor, nn.Parameter}
        and kind.__torch_dispatch__ is _NO_DISPATCH
    )
