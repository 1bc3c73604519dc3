"""Run a step on fake tensors, with copies of the module, its optimizer and its inputs.

There is no table of optimizers. Any class that keeps tensors in ``state`` is copied and steps by
its own code.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks as saving
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from lightning_unitscale.capture.absent_ranks import is_sharded, take_over, watching_shards
from lightning_unitscale.capture.breaks import reason_raised
from lightning_unitscale.capture.fake_device import (
    DATA_DEPENDENT,
    FakeScalars,
    SimulatedDevice,
    is_several_tensors,
    run_backward,
    simulating,
)
from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.functional.scale import hooks_in_transforms
from lightning_unitscale.memory.gpus import GPU
from lightning_unitscale.memory.record_operators import GraphTrace, ModuleTrace, StorageRecorder
from lightning_unitscale.memory.step_record import StepRecord
from lightning_unitscale.patching import shadowed

OptimizerLike = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
# Attributes that do not belong to a module and are not copied: Lightning's Trainer.
_SHARED = ("_trainer", "_fabric")
# Messages of fake tensors in torch 2.11 and 2.13.
_MIXED_DEVICES = (
    "Unhandled FakeTensor Device Propagation",
    "Expected all tensors to be on the same device",
)


class FakeCopies:
    """Fake tensors on one device in place of real, fake or meta ones. Only metadata is read.

    Tensors that share a storage get fakes that share one. A tensor always gets the same fake.
    """

    def __init__(self, mode: SimulatedDevice) -> None:
        self._mode = mode
        self._bases: dict[int, Tensor] = {}
        self.fakes: dict[int, Tensor] = {}  # keyed by the identity of the original
        self._alive: list[Any] = []  # keeps the originals alive, since identities are reused

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake of ``tensor``, a parameter if it is one."""
        if id(tensor) not in self.fakes:
            self._alive.append(tensor)
            self.fakes[id(tensor)] = self._make(tensor)
        return self.fakes[id(tensor)]

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or is_several_tensors(tensor):
            raise TypeError(
                f"tensor={type(tensor).__name__} of layout {tensor.layout}: its memory is not one "
                "plain storage. Expected dense tensors. Profile the module before it is "
                "quantized or made sparse."
            )
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bases:
            self._alive.append(storage)
            count = -(-storage.nbytes() // tensor.element_size())
            with self._mode:
                self._bases[storage._cdata] = torch.empty(
                    count, dtype=tensor.dtype, device=self._mode.device
                )
        base = self._bases[storage._cdata]
        with self._mode, torch.no_grad():
            flat = base if base.dtype == tensor.dtype else base.view(tensor.dtype)
            fake = flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
            # It must not be a view. Autograd regenerates a view's function under a lock, and a mode
            # that observes its operators would wait for that lock forever.
            return fake.data.requires_grad_(tensor.requires_grad)


class FakeStep:
    """Fake module with its fake inputs and optimizer, and the recording of one step."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Any,
        device: torch.device,
        optimizer: OptimizerLike | None,
        gpu: GPU | None = None,
    ) -> None:
        self.recorder = StorageRecorder(device, gpu)
        if is_sharded(module):
            self.mode = take_over(module, device)
            copies = FakeCopies(self.mode)
            copies.fakes.update({id(param): param for param in module.parameters()})
            self.module = module
        else:
            self.mode = SimulatedDevice(device)
            copies = FakeCopies(self.mode)
            self.module = _fake_copy(module, copies)
        self.inputs = tree_map_only(Tensor, copies.of, inputs)
        self.optimizer: Optimizer | None = None
        if optimizer is not None:
            with self.mode:
                params = self.module.parameters()
                self.optimizer = _fake_optimizer(optimizer, params, copies.fakes, device)

    def run(
        self,
        trace: ModuleTrace | GraphTrace,
        forward: Callable[..., Any],
        loss: Callable[[Any], Tensor] | None = None,
        context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> StepRecord:
        """Record forward, backward and the optimizer's step."""
        recorder = self.recorder
        with (
            self.mode,
            recorder,
            watching_shards(recorder.resizing, recorder.paused),
            simulating(recorder.device, *([recorder.gpu.capability] if recorder.gpu else ())),
            _named_errors(recorder),
            _single_sequences(self.inputs),
        ):
            self._declare(trace)
            args, kwargs = self.inputs
            with trace.watching():
                with saving(recorder.keep, lambda kept: kept), hooks_in_transforms(), context():
                    output = forward(*args, **kwargs)
                    roots = _roots(output, loss)
                recorder.phase = "backward"
                if roots:
                    run_backward(roots)
            del output, roots
            for param in self.module.parameters():
                if param.grad is not None:
                    recorder.declare(param.grad, "gradient")
            if self.optimizer is not None:
                recorder.phase = "optimizer"
                with FakeScalars():
                    self.optimizer.step()
        return recorder.finished()

    def _declare(self, trace: ModuleTrace | GraphTrace) -> None:
        """Register the tensors from before the step, and their names."""
        for prefix, module in _children_first(self.module):
            for name, param in module.named_parameters(prefix, recurse=False):
                self.recorder.declare(param, "parameter")
                trace.name_input(param, name)
            for name, buffer in module.named_buffers(prefix, recurse=False):
                self.recorder.declare(buffer, "buffer")
                trace.name_input(buffer, name)
        for path, value in tree_flatten_with_path(self.inputs)[0]:
            if isinstance(value, Tensor):
                self.recorder.declare(value, "input")
                trace.name_input(value, "input" + "".join(map(str, path[1:])))
        for tensor in state_tensors(self.optimizer) if self.optimizer is not None else ():
            self.recorder.declare(tensor, "optimizer")


def _children_first(
    module: nn.Module, path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their paths in the order in which ``module.to(device)`` moves them."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name, seen)
    yield path, module


def _fake_copy(module: nn.Module, copies: FakeCopies) -> nn.Module:
    """Copy the module with fake tensors, so that the user's own is unchanged."""
    shared: dict[int, Any] = {}
    for submodule in module.modules():
        # Its parameters and buffers are in its own dictionaries.
        for tensor in tensors_in(list(vars(submodule).values())):
            copies.of(tensor)
        values = [vars(submodule).get(name) for name in _SHARED]
        shared.update({id(value): value for value in values})
    try:
        return copy.deepcopy(module, memo={**shared, **copies.fakes})
    except Exception as error:
        raise RuntimeError(
            f"`module={type(module).__name__}`: it cannot be copied ({error}). Expected a module "
            "that copy.deepcopy can copy. Keep other objects, such as open files, out of it."
        ) from error


def own_loss(output: Any) -> Any:
    """Return the loss in a step's result, or the result itself if there is none."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return own if isinstance(own, Tensor) else output


def _roots(output: Any, loss: Callable[[Any], Tensor] | None) -> list[Tensor]:
    """Return the tensors that the backward pass starts from, or none if no gradient is needed."""
    output = own_loss(output) if loss is None else loss(output)
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


@contextlib.contextmanager
def _single_sequences(inputs: Any) -> Iterator[None]:
    """Report one sequence in a row to transformers, unless the user passes positions."""
    # Without values, transformers assumes several. It then makes a mask, and attention other copies
    # (``masking_utils.py`` of 5.13 to 5.23, for models without a cache of keys).
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if masks is None or not hasattr(masks, name):
        yield
        return
    original = getattr(masks, name)
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in(inputs)}

    def found(position_ids: Tensor) -> Any:
        is_given = position_ids.untyped_storage()._cdata in given
        return original(position_ids) if is_given else None

    with shadowed(masks, **{name: found}):
        yield


@contextlib.contextmanager
def _named_errors(recorder: StorageRecorder) -> Iterator[None]:
    """Name the node in errors about nodes that cannot run on fake tensors."""
    try:
        yield
    except DATA_DEPENDENT as error:
        where = reason_raised(error).where or "it"
        raise RuntimeError(
            f"node {recorder.running}: {where} depends on the values of a tensor ({error}). A "
            "profile runs on shapes without values. Take .item(), boolean indexing and branches on "
            "tensors out of the step to profile it."
        ) from error
    except RuntimeError as error:
        if not any(message in str(error) for message in _MIXED_DEVICES):
            raise
        raise RuntimeError(
            f"node {recorder.running}: it mixes devices ({error}). All tensors of the step must be "
            "on the profiled device. Make new tensors on the device of an input or a parameter."
        ) from error


def _fake_optimizer(
    optimizer: OptimizerLike,
    params: Iterable[nn.Parameter],
    fakes: Mapping[int, Tensor],
    device: torch.device,
) -> Optimizer:
    """Return an optimizer like the given one for fake parameters, with its state made."""
    if isinstance(optimizer, Optimizer):
        updated = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for tensor in (*updated, *optimizer.state):
            if id(tensor) not in fakes:
                raise ValueError(
                    f"`optimizer`: it updates a tensor of shape {tuple(tensor.shape)} that is no "
                    "parameter of the module. Expected an optimizer of the module's own "
                    "parameters. Make a new one if the module was copied or converted since."
                )
        groups = [[fakes[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        fake = optimizer_for(optimizer, groups)
        # Some optimizers have state before the first step.
        for param, state in optimizer.state.items():
            fake.state[fakes[id(param)]] = _fake_state(state, device)
    else:
        fake = optimizer([param for param in params if param.requires_grad])
        if not isinstance(fake, Optimizer):
            raise TypeError(
                f"`optimizer={optimizer!r}`: it made a {type(fake).__name__}. Expected an "
                "optimizer, its class, or a function of the parameters that returns one."
            )
    make_state(fake, device)
    return fake


def optimizer_for(optimizer: Optimizer, groups: Iterable[list[Tensor]]) -> Optimizer:
    """Copy an optimizer with its settings, without its state, for other parameters."""
    other: Optimizer = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    # A scheduler replaces ``step`` on the object, and calling that would advance the schedule.
    vars(other).pop("step", None)
    for name in [name for name in vars(other) if name.endswith("_hooks")]:
        vars(other)[name] = OrderedDict()
    other.state = defaultdict(dict)
    other.param_groups = [
        {**group, "params": params}
        for group, params in zip(optimizer.param_groups, groups, strict=True)
    ]
    return other


def make_state(optimizer: Optimizer, device: torch.device) -> None:
    """Let an optimizer of fake parameters create the state that it has after its first step."""
    for group in optimizer.param_groups:
        # On a GPU torch uses the implementation over lists of tensors, which has other temporaries.
        # It does not choose it for fake tensors, nor for shards.
        is_open = group.get("foreach", True) is None and not group.get("fused")
        if device.type == "cuda" and is_open and not any(map(is_several_tensors, group["params"])):
            group["foreach"] = True
    with FakeScalars():
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
                    param.grad = _no_rows(param) if is_sparse else torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _no_rows(param: Tensor) -> Tensor:
    """Return a sparse gradient without entries, which coalescing leaves unchanged."""
    index, rows = param.new_zeros(1, 0, dtype=torch.long), param.new_zeros(0, *param.shape[1:])
    return torch.sparse_coo_tensor(
        index, rows, param.shape, is_coalesced=True, check_invariants=False
    )


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return every tensor that the optimizer keeps between steps."""
    return tensors_in([dict(state) for state in optimizer.state.values()])


def _fake_state(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    def fake(leaf: Tensor) -> Tensor:
        # Counts of steps stay on the CPU.
        target = device if leaf.dim() else "cpu"
        if is_several_tensors(leaf):
            return torch.empty_like(leaf, device=target)
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=target)

    return tree_map_only(Tensor, fake, dict(state))
