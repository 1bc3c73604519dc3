"""What running a step on fake tensors left behind: who allocated what, and until when.

Plain data, without a tensor in it. Everything that is said about memory is computed from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")

# What a storage is for. An activation is saved for the backward pass; the rest is temporary.
Kind = Literal["parameter", "buffer", "input", "gradient", "optimizer", "activation", "temporary"]
KINDS: tuple[Kind, ...] = (
    "parameter", "buffer", "optimizer", "input", "gradient", "activation", "temporary",
)  # fmt: skip

OUTSIDE = -1  # instead of the place of a node or of an operator, where there is none


@dataclass(frozen=True)
class StorageLife:
    """One storage, from its allocation to its release.

    Attributes:
        num_bytes: Size of the whole storage, whatever part of it a tensor shows.
        kind: What it is for.
        node: Place of the forward node that allocated it, in its forward or its backward.
        born: Place of the operator that allocated it; :data:`OUTSIDE` if it was there before.
        name: Path of a parameter or buffer, or name of an input.
    """

    num_bytes: int
    kind: Kind
    node: int = OUTSIDE
    born: int = OUTSIDE
    name: str = ""


@dataclass(frozen=True)
class OperatorCall:
    """One ATen operator of the step.

    Attributes:
        name: Such as ``aten.addmm.default``.
        phase: Part of the step that it ran in.
        node: Place of the forward node that it belongs to.
        flops: Floating-point operations of its products.
        bytes_moved: Bytes that it reads and writes.
        workspace_bytes: What its kernel allocates for itself, beside its results.
    """

    name: str
    phase: Phase
    node: int
    flops: int = 0
    bytes_moved: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Event:
    """An allocation, a release or a change of size.

    Attributes:
        storage: Place of the storage.
        change: Bytes added; negative for a release.
        operator: Place of the last operator that had run.
    """

    storage: int
    change: int
    operator: int


@dataclass(frozen=True)
class SavedStorage:
    """A storage that autograd kept for the backward pass.

    Attributes:
        storage: Place of the storage.
        node: Place of the forward node that made autograd keep it.
    """

    storage: int
    node: int


@dataclass(frozen=True)
class NodeRecord:
    """One node of the forward graph: one call of a torch function.

    Attributes:
        name: Unique within the step, and made of module path and function.
        op: Name of the function.
        module: Path of the module that called it; empty for the root.
        inputs: Names of the nodes, parameters, buffers and inputs that it reads.
        input_storages: Storage of each of ``inputs``.
        output_storages: Storages of its results.
        shape: Shape of its first result.
        dtype: Type of its first result, such as ``float32``.
    """

    name: str
    op: str
    module: str
    inputs: tuple[str, ...] = ()
    input_storages: tuple[int, ...] = ()
    output_storages: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class StepRecord:
    """A whole step: forward, backward and, if there is one, the optimizer.

    Attributes:
        device: Type of the device that was simulated; storages elsewhere are not in the record.
        nodes: The forward graph.
        storages: Every storage of the device.
        operators: Every operator, in the order of execution.
        events: Allocations and releases in their order.
        saved: What autograd kept, in the order in which it did; a storage may occur repeatedly.
    """

    device: str
    nodes: tuple[NodeRecord, ...] = field(repr=False)
    storages: tuple[StorageLife, ...] = field(repr=False)
    operators: tuple[OperatorCall, ...] = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    saved: tuple[SavedStorage, ...] = field(repr=False)
