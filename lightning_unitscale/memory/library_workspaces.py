"""Count the memory that cuBLAS, cublasLt and cuDNN keep.

Torch gives each thread's cuBLAS handle a workspace before its first matmul, and keeps it
(``aten/src/ATen/cuda/CublasHandlePool.cpp``). The forward pass and the optimizer run in the main
thread, the backward pass in a thread of autograd's engine. A matmul with a bias goes through
cublasLt (``native/cuda/Blas.cpp``), whose workspace is separate. cuDNN's dropout between recurrent
layers keeps the states of its random numbers (``native/cudnn/RNN.cpp``, ``DropoutState``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from lightning_unitscale.memory.gpus import GPU
from lightning_unitscale.memory.operator_bytes import by_operator
from lightning_unitscale.memory.step_record import OUTSIDE, Event, StepRecord, StorageLife

aten = torch.ops.aten
Thread = Literal["main", "backward"]
Library = Literal["cublas", "cublaslt", "cudnn"]
# Operators of torch that call cuBLAS.
_CUBLAS = by_operator(
    dict.fromkeys(
        ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot",
         "_scaled_mm"),
        True,
    )
)  # fmt: skip
_LT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Each thread that the GPU can hold has a generator, XORWOW by the documentation of cuRAND, with six
# words of 32 bits (Marsaglia 2003, "Xorshift RNGs", section 3.1).
_GENERATOR_BYTES = 6 * 4


class Workspace(NamedTuple):
    """A workspace that a library keeps for a thread."""

    thread: Thread
    library: Library

    def num_bytes(self, gpu: GPU) -> int:
        """Return its size, which the environment may change as it does in torch."""
        if self.library == "cublas":
            return _configured() or gpu.cublas_workspace_bytes
        if self.library == "cudnn":
            num_threads = gpu.num_multiprocessors * gpu.threads_per_multiprocessor
            return num_threads * _GENERATOR_BYTES
        kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
        return int(kib) * 1024 if kib.isdigit() else gpu.cublaslt_workspace_bytes


class KeptWorkspaces:
    """The workspaces that a step needs, each with the operator that needs it first."""

    def __init__(self, gpu: GPU | None) -> None:
        self._gpu = gpu
        self._first_uses: dict[Workspace, int] = {}

    def note(self, function: Any, args: Sequence[Any], record: StepRecord) -> None:
        """Note the workspaces of the last operator of a record."""
        packet = getattr(function, "overloadpacket", function)
        index = len(record.operators) - 1
        if self._gpu is not None and packet is aten._cudnn_rnn and args[12] and args[11] > 0:
            self._first_uses.setdefault(Workspace("main", "cudnn"), index)
        if self._gpu is None or packet not in _CUBLAS:
            return
        in_backward = record.operators[index].phase == "backward"
        thread: Thread = "backward" if in_backward else "main"
        self._first_uses.setdefault(Workspace(thread, "cublas"), index)
        if _goes_through_lt(packet, args):
            self._first_uses.setdefault(Workspace(thread, "cublaslt"), index)

    def add_to(self, record: StepRecord) -> None:
        """Add them to a record as storages that an earlier step has made."""
        for workspace, operator in self._first_uses.items():
            assert self._gpu is not None
            index, num_bytes = len(record.storages), workspace.num_bytes(self._gpu)
            record.storages.append(StorageLife(num_bytes, "library"))
            record.events.append(Event(index, num_bytes, OUTSIDE))
            record.made_at[index] = operator


def _goes_through_lt(packet: Any, args: Sequence[Any]) -> bool:
    """Check ``isInputCompliesAddmmCudaLt``: a bias of one dimension, no vectors."""
    name = packet.__name__
    if name == "_scaled_mm":
        return True
    if name not in ("addmm", "_addmm_activation"):
        return False
    bias, first, second = args[:3]
    return (
        bias.dim() == 1
        and bias.is_contiguous()
        and bias.dtype == first.dtype
        and first.dtype in _LT_TYPES
        and min(*first.shape, *second.shape) > 1
    )


def _configured() -> int:
    """Return the bytes that ``CUBLAS_WORKSPACE_CONFIG`` asks for, such as ``":4096:8"``."""
    pools = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(1024 * int(size) * int(count) for size, count in pools)
