"""Cases of the conformance matrix, and short ways to write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batches = Callable[[], list[tuple[Any, ...]]]

# Batches far from RMS 1 and from each other: units of the first are wrong for the others.
SCALES = (3.0, 0.05, 40.0)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists, dictionaries and dataclasses, in order."""
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name))


def weighted_sum(output: Any) -> Tensor:
    """The sum of all floating-point outputs with fixed, uneven weights."""
    total: Any = 0.0
    for tensor in tensors_in(output):
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_floating_point():
            weights = torch.linspace(-1.0, 2.0, tensor.numel(), device=tensor.device)
            weights = weights.reshape(tensor.shape)
            total = (
                total + (tensor.to(torch.promote_types(tensor.dtype, torch.float)) * weights).sum()
            )
    return total


@dataclass(frozen=True)
class Case:
    """A module, three batches of arguments for it, and the loss of its result.

    Args:
        name: Theme and name, as they appear in the test's id.
        module: Makes the module; the harness seeds every generator before.
        batches: Makes the batches, each the positional arguments of one call.
        loss: From the module's output to a scalar.
        is_finite: Whether losses and gradients must be finite numbers, which makes sure that a
            case has not become one of NaNs by chance.
        on_cpu: Why it runs on a CPU only; empty if it runs anywhere.
    """

    name: str
    module: Callable[[], nn.Module]
    batches: Batches
    loss: Callable[[Any], Tensor] = weighted_sum
    is_finite: bool = True
    on_cpu: str = ""


def noise(index: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers at the scale of batch ``index``."""
    return (torch.randn(*shape) * SCALES[index]).to(dtype)


def each(make: Callable[[int], tuple[Any, ...]]) -> Batches:
    """Three batches from a function of their index."""
    return lambda: [make(index) for index in range(len(SCALES))]


def rows(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Batches:
    """Three batches of one tensor each, which asks for a gradient if ``grad``."""
    return each(lambda index: (noise(index, *shape, dtype=dtype).requires_grad_(grad),))


class Step(nn.Module):
    """A function of itself and a batch as a module, with layers, parameters and buffers by name."""

    def __init__(
        self, function: Callable[..., Any], attributes: dict[str, Callable[[], Any]]
    ) -> None:
        super().__init__()
        self.function = function
        for name, make in attributes.items():
            value = make()
            if type(value) is Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def linear(size: int = 8, out: int | None = None) -> Callable[[], nn.Linear]:
    """A linear layer, not made yet."""
    return lambda: nn.Linear(size, size if out is None else out)


class Zoo:
    """The cases of one theme, in the order in which they are written."""

    def __init__(self, theme: str) -> None:
        self.theme = theme
        self.cases: list[Case] = []

    def add(
        self,
        name: str,
        module: Callable[[], nn.Module],
        batches: Batches | None = None,
        **options: Any,
    ) -> None:
        """Adds a module as it is; by default its batches are of 4 rows of 8 numbers."""
        self.cases.append(Case(f"{self.theme}-{name}", module, batches or rows(4, 8), **options))

    def step(
        self,
        batches: Batches | None = None,
        *,
        name: str | None = None,
        loss: Callable[[Any], Tensor] = weighted_sum,
        is_finite: bool = True,
        on_cpu: str = "",
        **attributes: Callable[[], Any],
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Adds the decorated function as a :class:`Step`, by default of two linear layers."""
        made = attributes or {"a": linear(), "b": linear()}

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.add(
                name or function.__name__,
                lambda: Step(function, made),
                batches,
                loss=loss,
                is_finite=is_finite,
                on_cpu=on_cpu,
            )
            return function

        return register
