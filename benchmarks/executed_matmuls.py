"""Record what torch's own matmul kernels read on a CPU, whatever calls them.

A dispatch mode sees what a model asks for. Unit scaling exchanges kernels, so that what is
multiplied is known below them only.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_unitscale.capture.module_steps import matmuls_of
from lightning_unitscale.matmuls.kernels import num_overridden
from lightning_unitscale.matmuls.torch_internals import Kernel, KernelOverrides

# Where the matrix operands of ATen's matmuls stand.
MATMUL_OPERANDS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::mv": (0, 1),
    "aten::dot": (0, 1),
    "aten::vdot": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::addbmm": (1, 2),
    "aten::addmv": (1, 2),
    "aten::_grouped_mm": (0, 1),
    "aten::conv_tbc": (0, 1),
    "aten::conv_tbc_backward": (0, 1, 2),
    "aten::_trilinear": (0, 1, 2),
    "aten::convolution": (0, 1),
    "aten::convolution_backward": (0, 1, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3),
}


def operands_read(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the matrices that a call reads: not all for some of a convolution's gradients.

    Args:
        name: Of the operator, such as ``aten::mm``; others than matmuls read none.
        args: Arguments of the call.
    """
    if name != "aten::convolution_backward":
        return MATMUL_OPERANDS.get(name, ())
    of_input, of_weight, _ = args[10]
    read = ((1,) if of_weight else ()) + ((2,) if of_input else ())
    return (0, *read) if read else ()


# Called with the name of a matmul's operand, such as ``aten::mm[0]``, and the operand.
See = Callable[[str, Tensor], None]


def has_torchs_own_kernels() -> bool:
    """Whether no matmul is overridden, except by scaled modules that are no longer referenced."""
    if num_overridden():
        gc.collect()  # only then: it takes long where there are many objects
    return num_overridden() == 0


@contextmanager
def below_all_kernels(see: See) -> Iterator[None]:
    """Within this context ``see`` gets what torch's own kernels of matmuls read, in every thread.

    Below whatever else has kernels of its own, so nothing may have any when it begins or ends. A
    kernel within a kernel is not seen.
    """
    assert has_torchs_own_kernels()
    gc.freeze()  # what is there already need not be gone through at the end
    overrides, running = KernelOverrides("CPU"), threading.local()

    def watched(name: str, original: Kernel) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            if getattr(running, "is_inside", False):
                return original(*args, **kwargs)
            for position in operands_read(name, args):
                see(f"{name}[{position}]", args[position].detach())
            running.is_inside = True
            try:
                return original(*args, **kwargs)
            finally:
                running.is_inside = False

        return kernel

    for name in MATMUL_OPERANDS:
        overrides.put(name.removeprefix("aten::"), functools.partial(watched, name))
    try:
        yield
    finally:
        is_alone = has_torchs_own_kernels()
        gc.unfreeze()
        overrides.remove()
    assert is_alone


@contextmanager
def below(module: nn.Module, see: See) -> Iterator[None]:
    """:func:`below_all_kernels`, also of a module that transforms have put in units or formats."""
    if (matmuls := matmuls_of(module)) is None:
        with below_all_kernels(see):
            yield
        return
    matmuls.detach()
    try:
        with below_all_kernels(see):
            matmuls.attach_again()
            try:
                yield
            finally:
                matmuls = matmuls_of(module)
                matmuls.detach()
    finally:
        matmuls.attach_again()
