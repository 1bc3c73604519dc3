"""Tensor subclasses, and parameters that a layer transforms before it multiplies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.conformance.cases import Zoo, each, linear, noise

zoo = Zoo("subclasses")
CASES = zoo.cases


class Named(Tensor):
    """A tensor with a name, which its results have too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Named):
            result.label = next((a.label for a in args if hasattr(a, "label")), "")
        return result


def _named(index: int, *shape: int) -> Named:
    tensor = noise(index, *shape).as_subclass(Named)
    tensor.label = f"batch {index}"
    return tensor


@zoo.step(each(lambda i: (_named(i, 4, 8),)))
def a_named_batch(m: Any, x: Named) -> Tensor:
    h = m.a(x)
    return m.b(h) * len(h.label)


@zoo.step(each(lambda i: (_named(i, 4, 8),)))
def a_named_batch_is_written(m: Any, x: Named) -> Tensor:
    x[0] = 0.5
    h = m.a(x)
    h += x
    return m.b(h) @ x.mT


@zoo.step(
    each(lambda i: (_named(i, 2, 3, 6, 6),)),
    a=lambda: nn.Conv2d(3, 4, 3),
    b=lambda: nn.Conv2d(4, 2, 1),
)
def a_named_image(m: Any, x: Named) -> Tensor:
    return m.b(F.relu(m.a(x)))


@zoo.step(each(lambda i: (_named(i, 4, 8),)))
def a_named_batch_without_its_name(m: Any, x: Named) -> Tensor:
    return m.b(m.a(x.as_subclass(Tensor)))


class Counted(Tensor):
    """Counts the functions that are called on it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.calls += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@zoo.step(each(lambda i: (noise(i, 4, 8).as_subclass(Counted),)))
def a_counted_batch(m: Any, x: Counted) -> Tensor:
    before = Counted.calls
    h = m.a(x) @ x.mT
    return h * (Counted.calls - before) + m.b(x).mean()


class Plain(Tensor):
    """Nothing but another type."""


@zoo.step(each(lambda i: (noise(i, 4, 8).as_subclass(Plain),)))
def a_batch_of_another_type(m: Any, x: Plain) -> Tensor:
    h = m.a(x)
    return m.b(h) if isinstance(h, Plain) else h


@zoo.step(a=linear(), scale=lambda: nn.Parameter(torch.ones(8, 8).as_subclass(Plain)))
def a_parameter_of_another_type(m: Any, x: Tensor) -> Tensor:
    return m.a(x) @ m.scale


class Wrapped(Tensor):
    """A tensor around another, whose operations it passes on."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["inner"])

    def unwrapped(self) -> Tensor:
        return self.inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner_of(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        result = func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs or {}))
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return Wrapped(result)
        return tree_map(lambda v: Wrapped(v) if isinstance(v, Tensor) else v, result)


def _plain_of(tensor: Tensor) -> Tensor:
    """Out of the wrapper, with a gradient that goes back into it."""
    return Unwrap.apply(tensor)


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Wrapped) -> Tensor:
        return tensor.inner.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Wrapped:
        return Wrapped(gradient)


@zoo.step(each(lambda i: (Wrapped(noise(i, 4, 8)),)))
def a_wrapped_batch(m: Any, x: Wrapped) -> Tensor:
    return _plain_of(m.b(torch.tanh(m.a(x))))


@zoo.step(each(lambda i: (Wrapped(noise(i, 4, 8)),)))
def a_wrapped_batch_and_plain_layers(m: Any, x: Wrapped) -> Tensor:
    return m.b(m.a(x.inner)) + _plain_of(m.a(x))


@zoo.step()
def wrapped_within_the_step(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = (Wrapped(m.a(x)) @ Wrapped(x.mT)).inner
    return m.b(x).mean() * target


class Doubling(TorchDispatchMode):
    """Doubles what ``tanh`` returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2.0 if func is torch.ops.aten.tanh.default else result


@zoo.step()
def a_dispatch_mode_of_the_user(m: Any, x: Tensor) -> Tensor:
    with Doubling():
        return m.b(torch.tanh(m.a(x)))


class Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.tanh else result


@zoo.step()
def a_function_mode_of_the_user(m: Any, x: Tensor) -> Tensor:
    with Halving():
        return m.b(torch.tanh(m.a(x)))


class CountingMatmuls(TorchDispatchMode):
    """Counts matmuls, as profilers and FLOP counters do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.num_matmuls += func in matmuls
        return func(*args, **(kwargs or {}))


@zoo.step()
def matmuls_counted_by_the_user(m: Any, x: Tensor) -> Tensor:
    with CountingMatmuls() as counting:
        h = m.b(m.a(x)) @ x.mT
    return h * counting.num_matmuls


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class LowRank(nn.Module):
    """A learned matmul that is added to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(8, 2) * 0.1) for _ in range(2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right.mT


def _parametrized(make: Any) -> Any:
    def sequence() -> nn.Module:
        return nn.Sequential(make(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))

    return sequence


def _with(parametrization: Any) -> Any:
    def register(layer: nn.Module) -> nn.Module:
        parametrize.register_parametrization(layer, "weight", parametrization())
        return layer

    return _parametrized(register)


zoo.add("parametrization", _with(Symmetric))
zoo.add("parametrization_with_a_matmul", _with(LowRank))
zoo.add("weight_norm", _parametrized(parametrizations.weight_norm))
zoo.add("spectral_norm", _parametrized(parametrizations.spectral_norm))
for _map in ("matrix_exp", "cayley", "householder"):
    zoo.add(
        f"orthogonal_{_map}",
        _parametrized(lambda layer, m=_map: parametrizations.orthogonal(layer, orthogonal_map=m)),
    )
zoo.add("weight_norm_of_old", _parametrized(lambda layer: nn.utils.weight_norm(layer)))
zoo.add("spectral_norm_of_old", _parametrized(lambda layer: nn.utils.spectral_norm(layer)))
zoo.add("pruned", _parametrized(lambda layer: prune.random_unstructured(layer, "weight", 0.4)))
zoo.add("pruned_rows", _parametrized(lambda layer: prune.ln_structured(layer, "weight", 0.5, 2, 0)))


@zoo.step(a=linear(), b=linear())
def cached_parametrizations(m: Any, x: Tensor) -> Tensor:
    if not parametrize.is_parametrized(m.a):
        parametrize.register_parametrization(m.a, "weight", Symmetric(), unsafe=True)
    with parametrize.cached():
        return m.b(m.a(torch.tanh(m.a(x))))


class Adapter(nn.Module):
    """A frozen layer with a low-rank product beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(F.dropout(self.down(x), 0.1)) * 2.0


zoo.add("low_rank_adapter", Adapter)


class Hyper(nn.Module):
    """A layer whose weight another layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(8, 64)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(x.mean(0)).view(8, 8)
        return F.linear(self.layer(x), weight)


zoo.add("weight_of_another_layer", Hyper)


class Tied(nn.Module):
    """One weight in an encoder and, transposed, in a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.again = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.encoder(x))
        return F.linear(h, self.again.weight.mT) + self.decoder(h)


zoo.add("tied_and_transposed", Tied)


def _shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Sequential(nn.Tanh(), layer))


zoo.add("one_layer_in_three_places", _shared)


def _one_weight() -> nn.Module:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return nn.Sequential(first, nn.GELU(), second)


zoo.add("one_weight_in_two_layers", _one_weight)


class Lazy(nn.Module):
    """Layers that learn their shapes from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


zoo.add("lazy_layers", Lazy, each(lambda i: (noise(i, 2, 3, 7),)))


class MadeInTheStep(nn.Module):
    """A layer that does not exist before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "second"):
            self.second = nn.Linear(x.shape[1], 4)
        return self.second(self.first(x))


zoo.add("a_layer_made_in_the_step", MadeInTheStep)
