"""Simulate a device that need not exist, for fake tensors.

C++ reads a fake tensor's device through the operator ``prim::device``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import reset_code
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_unitscale.patching import shadowed

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
DispatchMode = TorchDispatchMode
is_several_tensors = is_traceable_wrapper_subclass
aten = torch.ops.aten
# The simulated device as C++ sees it. Python's own has no index.
_STAND_IN = torch.device("cpu", 0)
_COMPUTE_CAPABILITY = (9, 0)  # default compute capability of the simulated GPU: Hopper


def is_control_flow(function: Any) -> bool:
    """Check whether an operator takes functions, as ``torch.cond`` and ``scan`` do."""
    return isinstance(function, HigherOrderOperator)


@contextlib.contextmanager
def forgetting_control_flow() -> Iterator[None]:
    """Let Dynamo forget, on leaving, that it skipped ``torch.cond`` and its like under a mode."""
    try:
        yield
    finally:
        for function in (torch.cond, scan, while_loop):
            for code in inspect.unwrap(function).__code__.co_consts:
                if isinstance(code, types.CodeType):
                    reset_code(code)


def run_control_flow(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run the first branch of a ``cond``, all of a ``scan``, or one round of a ``while_loop``."""
    return _CONTROL_FLOW.get(function.name(), function)(*args, **kwargs)


def _while_loop(
    goes_on: Callable[..., Any], body: Callable[..., Any], carried: Any, constants: Any
) -> tuple[Any, ...]:
    goes_on(*carried, *constants)
    return tuple(body(*carried, *constants))


def _scan(combine: Callable[..., Any], initial: Any, rows: Any, constants: Any = ()) -> list[Any]:
    carried, results = list(initial), []
    for step in range(len(rows[0])):
        outputs = combine(*carried, *[row[step] for row in rows], *constants)
        carried = list(outputs[: len(carried)])
        results.append(outputs[len(carried) :])
    return [*carried, *(torch.stack(column) for column in zip(*results, strict=True))]


_CONTROL_FLOW: dict[str, Callable[..., Any]] = {
    "cond": lambda predicate, taken, other, operands: taken(*operands),
    "while_loop": _while_loop,
    "scan": _scan,
}


def has_autocast_rule(operator: str) -> bool:
    """Check whether a GPU's autocast has a rule for an operator in this version of torch."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "AutocastCUDA")


def current_autograd_function() -> Any:
    """Return the function of autograd's graph whose backward is running, or ``None``."""
    return torch._C._current_autograd_node()


class SimulatedDevice(FakeTensorMode):
    """Mode in which nothing is computed. The user's constants become fake automatically."""

    # C++ needs a stream and a queue for the device of every tensor in autograd, and ends the
    # process if the device has no driver. So C++ sees `cpu:0`. Tensors that it makes there are made
    # on the simulated device, which Python code sees. With a CPU's queue the backward pass runs in
    # the calling thread, where dispatch modes see it. A single random number on the CPU is the
    # middle of its range, because programs branch on it. So layers that are dropped with a
    # probability below one half stay, which needs the most memory.

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and not self.in_kernel_invocation:
            device: torch.device = args[0].device
            return device if device.type == "cpu" else _STAND_IN
        kwargs = kwargs or {}
        # ``to`` compares the devices in C++, where both are the stand-in, and calls ``_to_copy``.
        is_new = kwargs.get("device") == _STAND_IN and func.overloadpacket is not aten.to
        if is_new and self.device.type != "cpu":
            kwargs = {**kwargs, "device": self.device}
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        middle = _MIDDLES.get(func)
        if middle is None or result.numel() != 1 or result.device.type != "cpu":
            return result
        with no_dispatch():
            value = torch.full(result.shape, middle(args), dtype=result.dtype)
        return self.fake_tensor_converter.from_real_tensor(self, value, make_constant=True)


_MIDDLES: dict[Any, Callable[[Any], float]] = {
    aten.rand.default: lambda args: 0.5,
    aten.randint.default: lambda args: args[0] // 2,
    aten.randint.low: lambda args: (args[0] + args[1]) // 2,
}


@contextlib.contextmanager
def simulating(
    device: torch.device, capability: tuple[int, int] = _COMPUTE_CAPABILITY
) -> Iterator[None]:
    """Make Python code see the simulated device as if it existed."""
    # Without a GPU, torch turns its autocast off with a warning, and C++ sees no tensors on it. So
    # the CPU's autocast runs instead, with the requested type. `memory/gpu_kernels.py` corrects the
    # differences.
    if device.type == "cpu":
        yield
        return
    original = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == device.type:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(device.type)
        original(self, device_type, dtype, *args, **kwargs)

    with (
        shadowed(torch.autocast, __init__=init),
        shadowed(torch.cuda, get_device_capability=lambda *_: capability),
        torch._C._IncludeDispatchKeyGuard(torch.DispatchKey.AutocastCPU),
    ):
        yield


# Within it, Python code that computes an operator does not reach the modes of torch functions.
without_function_modes = torch._C.DisableTorchFunction


def is_question(function: Any) -> bool:
    """Check whether an operator only asks for a tensor's device, or marks a profile."""
    return function is torch.ops.prim.device.default or function.namespace == "profiler"


class OperatorMode(TorchDispatchMode):
    """Mode that runs operators, except for questions. Function modes do not see its own calls."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_question(func):
            return func(*args, **kwargs)
        with without_function_modes():
            return self.run(func, types, args, kwargs)

    def run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        raise NotImplementedError


@functools.cache
def is_composite(function: Any) -> bool:
    """Check whether an operator's only kernel calls other operators, as of ``to`` and ``linear``.

    Modes see it whole where autograd does not split it, as in a backward pass.
    """
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key))


def snapshot(tensor: Tensor) -> Tensor:
    """Return a fake tensor's present shape and storage as another tensor."""
    return fast_detach(tensor.fake_mode, tensor) if isinstance(tensor, FakeTensor) else tensor


def run_backward(roots: Sequence[Tensor]) -> None:
    """Run the backward pass with gradients of one."""
    # Torch function modes are off within ``torch.autograd.backward``, but a checkpoint must call
    # its functions as in the forward pass.
    gradients = tuple(torch.ones_like(root) for root in roots)
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class FakeScalars(TorchDispatchMode):
    """Mode that invents the value of a fake tensor, since optimizers read their step count."""

    # Allocations do not depend on this value. It is neither 0 nor 1, because optimizers may divide
    # by it.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return 0.5 if args[0].is_floating_point() else 2
        return func(*args, **(kwargs or {}))


# Their kernels write the losses of all elements into the result, and then resize it to a number
# (torch 2.13, ``native/Loss.cpp``, ``native/cuda/Loss.cu``). The storage keeps its size.
_RESIZED = frozenset(
    {aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.soft_margin_loss}
)


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors, corrected where they differ from the kernels."""
    packet = getattr(func, "overloadpacket", func)
    if packet in _RESIZED:
        loss = func(*args, **kwargs)
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return loss if loss.dim() or not shape else loss.new_empty(shape).as_strided((), ())
    if packet is aten._grouped_mm and args[0].dtype != torch.bfloat16:
        # Fake tensors know the shapes for BF16 only, the kernels also other types (torch 2.13).
        in_bf16 = [
            value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in args
        ]
        return func(*in_bf16, **kwargs).to(args[0].dtype)
    if packet is aten.native_layer_norm and args[0].device.type == "cpu":
        result, *statistics = func(*args, **kwargs)
        # For 16-bit inputs with FP32 gains the CPU keeps them in FP32, unlike fake tensors.
        dtype = args[0].dtype if args[2] is None else args[2].dtype
        return (result, *(statistic.to(dtype) for statistic in statistics))
    return func(*args, **kwargs)
