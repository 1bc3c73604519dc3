"""Train a case with and without the package, and list the differences, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.transforms import lossless_unit_scale, track_scales
from tests.conformance.cases import Case, tensors_in
from tests.helpers import same_bits

# How a case is trained: by callbacks of a Trainer, or by a transformation of the module.
CALLBACKS: dict[str, Callable[[], list[pl.Callback]]] = {
    "plain": list,
    "lossless": lambda: [UnitScaleCallback()],
    "monitor": lambda: [ScaleMonitor(every_n_steps=1, on_violation=None)],
    "both": lambda: [UnitScaleCallback(), ScaleMonitor(every_n_steps=1, on_violation=None)],
}
TRANSFORMS: dict[str, Callable[..., nn.Module]] = {
    "plain loop": lambda module, *batch: module,
    "lossless_unit_scale": lossless_unit_scale,
    "track_scales": lambda module, *batch: track_scales(module),
    "units, tracked": lambda module, *batch: track_scales(lossless_unit_scale(module, *batch)),
    "tracked, in units": lambda module, *batch: lossless_unit_scale(track_scales(module), *batch),
}


@dataclass
class Record:
    """Everything that a training shows and leaves behind, under a name for each part."""

    values: dict[str, Any] = field(default_factory=dict)
    coverage: Any = None

    def add(self, call: int, module: nn.Module, batch: Any, loss: Tensor, outputs: Any) -> None:
        """Adds the state after a call, its backward pass and the optimizer's step."""
        parts: dict[str, Any] = {"loss": loss}
        for index, tensor in enumerate(outputs):
            parts[f"output {index}"] = tensor
            parts[f"stride of output {index}"] = _stride(tensor)
        for name, param in module.named_parameters():
            parts[f"gradient of {name}"] = param.grad
            parts[f"parameter {name}"] = param
        for name, buffer in module.named_buffers():
            parts[f"buffer {name}"] = buffer
        for name, value in _attributes(module):
            parts[f"attribute {name}"] = value
        for index, tensor in enumerate(tensors_in(batch)):
            parts[f"input {index}"] = tensor
            if tensor.is_leaf and tensor.requires_grad:
                parts[f"gradient of input {index}"] = tensor.grad
        self.values |= {f"call {call}: {name}": _kept(value) for name, value in parts.items()}

    def add_random_states(self, device: str) -> None:
        """Adds the states of torch's, Python's and NumPy's generators."""
        self.values["random state of torch"] = torch.get_rng_state()
        if device == "cuda":
            self.values["random state of the device"] = torch.cuda.get_rng_state()
        self.values["random state of Python"] = random.getstate()
        self.values["random state of NumPy"] = np.random.get_state()[1].tolist()


def differences(found: Record, expected: Record) -> list[str]:
    """A line for each value that is not the same bit for bit; NaN is equal to NaN."""
    lines = [f"{name}: is missing" for name in expected.values.keys() - found.values.keys()]
    for name, value in found.values.items():
        if name not in expected.values:
            lines.append(f"{name}: is not in the plain run")
        elif not _is_same(value, expected.values[name]):
            lines.append(f"{name}: {_difference(value, expected.values[name])}")
    return lines


def coverage_of(callbacks: Sequence[pl.Callback]) -> Any:
    """Return a callback's counts of matmuls seen and scaled, if it has any."""
    return next((c.coverage for c in callbacks if hasattr(c, "coverage")), None)


@functools.cache
def plain(case: Case, method: str = "plain") -> Record:
    """The record of the case without the package; trained once for all comparisons."""
    return train(case, method)


def train(case: Case, method: str, device: str = "cpu") -> Record:
    """Three calls forward and backward, and a step of SGD after each.

    Args:
        case: Its module and batches are made on the device, and so is what they make.
        method: Of `CALLBACKS` or `TRANSFORMS`.
        device: The type of the device.
    """
    with warnings.catch_warnings():
        # Warnings are not what is compared here, and torch has some for many of the modules.
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        with made_on(device):
            module = case.module()
            batches = case.batches()
        random.seed(6)
        np.random.seed(6)
        torch.manual_seed(6)
        if method in CALLBACKS:
            return _fit(case, module, batches, CALLBACKS[method](), device)
        return _loop(case, TRANSFORMS[method](module, *batches[0]), batches, device)


def loss_on(case: Case, device: str) -> Tensor:
    """The loss of the first batch, with everything made on the device."""
    with warnings.catch_warnings(), made_on(device):
        warnings.simplefilter("ignore")
        return case.loss(case.module()(*case.batches()[0]))


# Copies, and those that take their indices or lengths from a CPU.
_ON_TWO_DEVICES = {"_to_copy", "copy_", "index", "index_put_", "_pack_padded_sequence"}


class Mixtures(TorchDispatchMode):
    """Notes operators whose tensors are on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        devices = {tensor.device for tensor in tensors if tensor.dim() > 0}
        if len(devices) > 1 and name not in _ON_TWO_DEVICES:
            self.operators.append(name)
        return func(*args, **(kwargs or {}))


def made_on(device: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors are made on the device, unless another one is named."""
    # On a CPU they are without it, and nothing stands between a module and torch.
    return contextlib.nullcontext() if device == "cpu" else torch.device(device)


class _Training(pl.LightningModule):
    """A LightningModule around a case's module."""

    def __init__(self, module: nn.Module, loss: Callable[[Any], Tensor], device: str) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.made_on = device

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        with made_on(self.made_on):
            output = self.module(*batch)
            return {"loss": self.loss(output), "outputs": tensors_in(output)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(self)


@dataclass
class _Batches:
    """An iterable that Lightning takes for one loader; it takes a list for one of loaders."""

    batches: list[tuple[Any, ...]]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.batches)


class _Recorder(pl.Callback):
    def __init__(self) -> None:
        self.record = Record()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.record.add(batch_idx, pl_module.module, batch, outputs["loss"], outputs["outputs"])


def _fit(
    case: Case, module: nn.Module, batches: Any, callbacks: list[pl.Callback], device: str
) -> Record:
    recorder = _Recorder()
    trainer = pl.Trainer(
        barebones=True,
        accelerator=device,
        devices=1,
        max_epochs=1,
        callbacks=[*callbacks, recorder],
    )
    trainer.fit(_Training(module, case.loss, device), _Batches(batches))
    recorder.record.add_random_states(device)
    recorder.record.coverage = coverage_of(callbacks)
    return recorder.record


def _loop(case: Case, module: nn.Module, batches: Any, device: str) -> Record:
    record, optimizer = Record(), _optimizer(module)
    for call, batch in enumerate(batches):
        optimizer.zero_grad()
        with made_on(device):
            output = module(*batch)
            loss = case.loss(output)
        loss.backward()
        optimizer.step()
        record.add(call, module, batch, loss, tensors_in(output))
    record.add_random_states(device)
    return record


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3)


def _stride(tensor: Tensor) -> Any:
    return tensor.stride() if tensor.layout is torch.strided else tensor.layout


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the state of modules that is neither a parameter nor a buffer."""
    kept = (Tensor, int, float, str, list, dict)
    return [
        (f"{path}.{name}".lstrip("."), value)
        for path, submodule in module.named_modules()
        for name, value in sorted(vars(submodule).items())
        if isinstance(value, kept) and not name.startswith("_")
    ]


def _kept(value: Any) -> Any:
    """A copy that later writes do not reach, every NaN in it the same one."""
    if isinstance(value, Tensor):
        if hasattr(value, "unwrapped"):
            value = value.unwrapped()
        value = value.detach()
        dense = value.clone() if value.layout is torch.strided else value.to_dense()
        value = dense.as_subclass(Tensor)
        if value.is_floating_point() or value.is_complex():
            value = torch.where(value.isnan(), float("nan"), value).to(value.dtype)
        return value
    if isinstance(value, (list, tuple)):
        return [_kept(part) for part in value]
    if isinstance(value, dict):
        return {key: _kept(part) for key, part in value.items()}
    return value


def _is_same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return same_bits(found, expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_is_same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            _is_same(found[key], expected[key]) for key in found
        )
    return type(found) is type(expected) and bool(found == expected)


def _difference(found: Any, expected: Any) -> str:
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return f"{found} is not {expected}"
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype} {found.shape} is not {expected.dtype} {expected.shape}"
    if not (found.is_floating_point() or found.is_complex()):
        return f"{int((found != expected).sum())} of {found.numel()} elements differ"
    count = int((_bytes(found) != _bytes(expected)).any(-1).sum())
    wide = torch.complex128 if found.is_complex() else torch.float64
    error = (found.to(wide) - expected.to(wide)).abs()
    return (
        f"{count} of {found.numel()} elements differ in their bits, by up to "
        f"{float(error.nan_to_num(nan=0).max()):.3g} "
        f"where the largest is {float(expected.to(wide).abs().nan_to_num(nan=0).max()):.3g}"
    )


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of each element."""
    tensor = torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor
    return tensor.contiguous().view(-1, 1).view(torch.uint8)
