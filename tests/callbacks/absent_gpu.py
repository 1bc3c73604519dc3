"""A simulated GPU: steps run on its fake tensors, and its calls are recorded."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

import lightning_unitscale
from lightning_unitscale.capture import graph_variants
from lightning_unitscale.capture.fake_device import SimulatedDevice, simulating
from lightning_unitscale.capture.operators import RULES
from lightning_unitscale.matmuls import execute
from lightning_unitscale.matmuls import fp8_linear as fp8
from lightning_unitscale.matmuls.kernels import matmul_kernel
from lightning_unitscale.monitor import input_gradients, rows, watched_call
from lightning_unitscale.scales import launches, transfer
from lightning_unitscale.scales.layout import MOMENTS, RowLayout

PACKAGE = str(Path(lightning_unitscale.__file__).parent)
CUDA = torch.device("cuda")
READS = {"item", "_local_scalar_dense", "nonzero", "equal", "is_nonzero"}


class FromOutside(TorchDispatchMode):
    """A mode that sees the operators of a captured graph, but not its capture."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Gpu(FromOutside):
    """A record of the requests to the device, step by step.

    Attributes:
        waits: Functions of the package in which the host waits, in each step.
        launches: Kernels of the package, in each step.
        number: What is read off it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[list[str]] = []
        self.launches: list[Counter[str]] = []
        self.number = 2.0**-4
        self._pinned: dict[int, Tensor] = {}

    def begin_step(self) -> None:
        self.waits.append([])
        self.launches.append(Counter())

    def wait(self) -> None:
        """Note the function of the package that waits, if it is one."""
        others = (__file__, transfer.__file__, str(Path(torch.__file__).parent))
        own = [f for f in traceback.extract_stack() if not f.filename.startswith(others)]
        if self.waits and own and own[-1].filename.startswith(PACKAGE):
            self.waits[-1].append(f"{Path(own[-1].filename).stem}.{own[-1].name}")

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "empty" and kwargs.get("pin_memory"):
            pinned = self._read(args[0], kwargs["dtype"])
            self._pinned[_address(pinned.untyped_storage())] = pinned
            return pinned
        if name == "copy_" and self._is_pinned(args[0]):
            if isinstance(args[1], FakeTensor) and not (*args, False)[2]:
                self.wait()
            return args[0]
        if name == "to":
            with self:
                return func.decompose(*args, **kwargs)
        if name == "_to_copy" and "device" in kwargs and kwargs["device"] != args[0].device:
            if not (self._is_pinned(args[0]) and kwargs.get("non_blocking")):
                self.wait()
            dtype = kwargs.get("dtype") or args[0].dtype
            if kwargs["device"].type == "cpu":
                return self._read(args[0].shape, dtype)
            return torch.empty(args[0].shape, dtype=dtype, device=CUDA)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_on_host = tensors or kwargs.get("device") in (None, torch.device("cpu"))
        if is_on_host and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name in READS:
            self.wait()
            return self.number
        modes = {tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)}
        if len(modes) == 1 and not isinstance(mode := modes.pop(), Device):
            # An example of a captured graph, which belongs to its capture.
            with unset_fake_temporarily(), mode:
                return func(*args, **kwargs)
        if name == "statistics_row":
            return self._row(*args)
        result = func(*args, **kwargs)
        if name == "fp8_matrices":
            self._cast(result, *args)
        return result

    def _read(self, shape: Any, dtype: torch.dtype) -> Tensor:
        with unset_fake_temporarily():
            read = torch.full(shape, self.number, dtype=dtype)
            if tuple(shape)[-1:] == (MOMENTS.num_columns,):
                # Rows of tensors of one such number each.
                read[..., : MOMENTS.index("sum")] = torch.tensor([1.0, 0.0, 0.0, 0.0])
                read[..., MOMENTS.index("square_sum")] = self.number**2
                if not self.number:
                    read[..., MOMENTS.index("abs_min")] = math.inf
            return read

    def _is_pinned(self, tensor: Tensor) -> bool:
        is_fake = isinstance(tensor, FakeTensor)
        return not is_fake and _address(tensor.untyped_storage()) in self._pinned

    def _row(self, tensor: Tensor, factor: Tensor | None, key: str) -> Tensor:
        from lightning_unitscale.scales import triton_statistics

        with self:
            return triton_statistics.triton_row(tensor, RowLayout.from_key(key))

    def _cast(self, casts: list[Tensor], matrix: Tensor, factor: Any, *others: Any) -> None:
        from lightning_unitscale.functional import triton_cast

        number, dtype, has_rows, has_turned = others
        with self, mock.patch.object(triton_cast, "cast_tiles", self.kernel("cast_tiles")):
            triton_cast.cast_matrix(
                matrix,
                factor[0] if factor else number,
                dtype,
                casts[0] if has_rows else None,
                casts[-1] if has_turned else None,
            )

    def kernel(self, name: str) -> Any:
        """A stand-in of a Triton kernel, of which launches are counted."""

        def launch(*_: Any, **__: Any) -> None:
            self.launches[-1][name] += 1

        kernel = mock.MagicMock()
        kernel.__getitem__.return_value = launch
        return kernel

    def event(self) -> Any:
        """An event of the device; one of this step is yet to come."""
        step = len(self.waits)

        def synchronize() -> None:
            if len(self.waits) == step:
                self.wait()

        return mock.Mock(query=lambda: len(self.waits) > step, synchronize=synchronize)


def _address(storage: torch.UntypedStorage) -> int:
    """Fake memory has its own addresses, on its own cache line."""
    return 64 * storage._cdata


def _place(tensor: Tensor) -> int:
    return _address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()


class Device(FromOutside, SimulatedDevice):
    """The device that steps run on."""


class CapturedDevice(SimulatedDevice):
    """The device that Dynamo sees while it captures steps.

    Args:
        *args: As for a mode of fake tensors.
        **kwargs: Likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        FakeTensorMode.__init__(self, *args, **kwargs)
        self.device = CUDA


class Kernels(FromOutside):
    """The overridden kernels of matmuls, which fake tensors do not come to."""

    def __init__(self) -> None:
        super().__init__()
        self._rules = {rule.operator: rule for rule in RULES}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self._rules.get(str(func).removeprefix("aten.").removesuffix(".default"))
        kernel = func if rule is None else matmul_kernel(rule, func)
        return kernel(*args, **(kwargs or {}))


@contextlib.contextmanager
def a_gpu() -> Iterator[Gpu]:
    """Within this context there is a GPU for code that uses fake tensors only."""
    from lightning_unitscale.scales import triton_statistics

    gpu = Gpu()
    readable = {"is_readable": torch.is_floating_point, "unseen": contextlib.nullcontext}
    stand_ins: list[tuple[Any, dict[str, Any]]] = [
        (
            torch.cuda,
            {
                "Event": gpu.event,
                "get_device_capability": lambda *_: (9, 0),
                "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
                "set_rng_state": lambda *_: None,
            },
        ),
        # A torch with CUDA would ask the driver, and has kernels that do not take fake tensors.
        (launches, {"current_stream": lambda index: 0}),
        (execute, {"overridden_kernel": lambda operator, _: getattr(torch.ops.aten, operator)}),
        (
            triton_statistics,
            {name: gpu.kernel(name) for name in ("partial_rows", "joint_rows")},
        ),
        (torch._subclasses, {"FakeTensorMode": CapturedDevice}),
        (torch.UntypedStorage, {"data_ptr": _address}),
        (Tensor, {"data_ptr": _place}),
        # The monitor and layers in FP8 leave fake tensors alone.
        (rows, readable),
        (graph_variants, {"unwatched": contextlib.nullcontext}),
        (input_gradients, readable),
        (watched_call, {"is_readable": torch.is_floating_point}),
        (fp8, {"has_subclass": lambda _: False}),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(Device(CUDA))
        stack.enter_context(simulating(CUDA))
        for owner, attributes in stand_ins:
            stack.enter_context(mock.patch.multiple(owner, **attributes))
        stack.enter_context(gpu)
        stack.enter_context(Kernels())
        yield gpu
