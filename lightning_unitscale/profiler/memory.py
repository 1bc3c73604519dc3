"""A device that need not exist, for fake tensors.

The file of the profiler that touches torch's own names. Checked on torch 2.13 and 2.11:
``FakeTensorMode`` and its exceptions, ``_current_autograd_node``, ``_execution_engine``,
``_IncludeDispatchKeyGuard``, ``HigherOrderOperator``, ``reset_code``, and that C++ asks a fake
tensor for its device through the operator ``prim::device``.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import reset_code
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_unitscale.shadowing import shadowed

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
# What C++ is told of the simulated device. Python's own is without an index.
_STAND_IN = torch.device("cpu", 0)


DispatchMode = TorchDispatchMode
is_several_tensors = is_traceable_wrapper_subclass


def is_control_flow(function: Any) -> bool:
    """Whether an operator takes functions, as ``torch.cond`` and ``scan`` do."""
    return isinstance(function, HigherOrderOperator)


@contextlib.contextmanager
def forgetting_control_flow() -> Iterator[None]:
    """Has Dynamo forget how it ran ``torch.cond`` and its like within this context.

    They compile themselves when they are called; under a mode Dynamo passes over them, and would
    from then on.
    """
    try:
        yield
    finally:
        for function in (torch.cond, scan, while_loop):
            for code in inspect.unwrap(function).__code__.co_consts:
                if isinstance(code, types.CodeType):
                    reset_code(code)


def current_autograd_function() -> Any:
    """The function of autograd's graph whose backward is running, or ``None``."""
    return torch._C._current_autograd_node()


class SimulatedDevice(FakeTensorMode):
    """The mode in which nothing is computed; constants of the user's become fake by themselves.

    C++ looks up a stream and a queue for the device of every tensor that takes part in autograd,
    and ends the process where the device has no driver. So C++ is told that the device is
    ``cpu:0``, and what it wants to make there is made on the device; Python code sees the device
    itself. A CPU's queue also means that the backward pass runs in the calling thread, where
    dispatch modes can see it.

    Args:
        device: The device, which need not exist.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and not self.in_kernel_invocation:
            given: torch.device = args[0].device
            return given if given.type == "cpu" else _STAND_IN
        kwargs = kwargs or {}
        # ``to`` compares the devices in C++, where both are the stand-in, and calls ``_to_copy``.
        is_made = kwargs.get("device") == _STAND_IN and func.overloadpacket is not torch.ops.aten.to
        if is_made and self.device.type != "cpu":
            kwargs = {**kwargs, "device": self.device}
        return super().__torch_dispatch__(func, types, args, kwargs)


# What code is told that asks for the GPU's generation where there is none: Ampere's.
_COMPUTE_CAPABILITY = (8, 0)


@contextlib.contextmanager
def simulating(device: torch.device) -> Iterator[None]:
    """Within this context Python code finds the simulated device as it would be.

    Where there is no GPU, torch switches its autocast off with a warning; and its kernels look for
    tensors on a GPU, which C++ sees none of. So autocast of the CPU stands in for it, with the
    type that was asked for; the functions in which the two differ are in ``device_kernels``.
    """
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
        shadowed(torch.cuda, get_device_capability=lambda *_: _COMPUTE_CAPABILITY),
        torch._C._IncludeDispatchKeyGuard(torch.DispatchKey.AutocastCPU),
    ):
        yield


def run_backward(roots: Sequence[Tensor]) -> None:
    """``torch.autograd.backward`` with gradients of one.

    The function itself would be seen by torch function modes as one call, within which they are
    off; but what a checkpoint runs again must be called as in the forward pass.
    """
    gradients = tuple(torch.ones_like(one) for one in roots)
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class FakeScalars(TorchDispatchMode):
    """Answers a program that asks a fake tensor for its value.

    Optimizers look at their step count; what they allocate does not depend on it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.answer(args[0])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def answer(tensor: Tensor) -> float | int:
        """The value of a tensor that has none; neither 0 nor 1, which may be divided by."""
        return 0.5 if tensor.is_floating_point() else 2


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operator on fake tensors, where they are wrong with what the kernels do."""
    packet = getattr(func, "overloadpacket", func)
    if packet is getattr(torch.ops.aten, "_grouped_mm", None) and args[0].dtype != torch.bfloat16:
        # Fake tensors know the shapes for BF16 only, the kernels also other types (torch 2.13).
        in_bf16 = [
            one.bfloat16() if isinstance(one, Tensor) and one.is_floating_point() else one
            for one in args
        ]
        return func(*in_bf16, **kwargs).to(args[0].dtype)
    if packet is torch.ops.aten.native_layer_norm and args[0].device.type == "cpu":
        result, *statistics = func(*args, **kwargs)
        # Of 16-bit inputs with FP32 gains the CPU keeps them in FP32, which fake tensors do not.
        dtype = args[0].dtype if args[2] is None else args[2].dtype
        return (result, *(one.to(dtype) for one in statistics))
    return func(*args, **kwargs)
