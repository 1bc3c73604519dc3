"""A rehearsal copies all inputs of a step."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.rollback import detached_copy
from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.transforms import lossless_unit_scale, track_scales
from tests.helpers import assert_same_bits


class Marked(Tensor):
    """A tensor with an attribute, like a medical image, that cannot be copied."""

    note: dict[str, Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Marked):
            known = [one for one in args if isinstance(one, Marked)]
            result.note = getattr(known[0], "note", {}) if known else {}
        return result


def marked(values: Tensor) -> Marked:
    result = values.as_subclass(Marked)
    result.note = {"spacing": 2.0}
    return result


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


INPUTS = {
    "computed": lambda: torch.randn(3, 4, requires_grad=True) * 2,
    "marked": lambda: marked(torch.randn(3, 4)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_deepcopy_cannot_copy(name: str) -> None:
    plain, x = network(), INPUTS[name]()
    with pytest.raises(RuntimeError):
        copy.deepcopy(x)
    scaled = lossless_unit_scale(plain, x)
    for module in (scaled, track_scales(plain)):
        result = module(x)
        assert type(result) is type(x)
        assert_same_bits(result.as_subclass(Tensor), plain(x).as_subclass(Tensor))
    assert len(scaled.gauge()) > 0  # type: ignore[operator]
    by_rules = unit_scale(plain)
    by_rules(x).sum().backward()
    assert "2 by rule" in by_rules.explain()  # type: ignore[operator]


def test_detached_copy_copies_each_tensor_once() -> None:
    leaf = torch.ones(2, requires_grad=True)
    computed = leaf * 2
    held = SimpleNamespace(inner=[computed])
    (first, second, third), named = detached_copy(((leaf, {"a": computed}, held), {"b": computed}))
    copied = named["b"]
    assert copied is second["a"] is third.inner[0]
    assert copied is not computed
    assert copied.is_leaf and copied.requires_grad
    assert first is not leaf and torch.equal(first, leaf)
    image = marked(computed.detach())
    (other,), _ = detached_copy(((image,), {}))
    assert type(other) is Marked and other.note == image.note and other.note is not image.note


class Shy(Tensor):
    """A class whose operations return plain tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_detached_copy_keeps_tensor_class() -> None:
    given = torch.randn(3).as_subclass(Shy)
    computed = (torch.randn(3, requires_grad=True) * 2).as_subclass(Shy)
    for tensor in (given, computed):
        copied = detached_copy(tensor)
        assert type(copied) is Shy and copied.requires_grad == tensor.requires_grad
        assert_same_bits(copied.as_subclass(Tensor), tensor.as_subclass(Tensor).detach())


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("how", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 4))])
def test_copy_of_scripted_module_is_trainable(how: Any) -> None:
    copied = track_scales(nn.Sequential(nn.Linear(4, 4), how(network())))
    loss = copied(torch.randn(3, 4)).square().mean()
    optimizer = torch.optim.SGD(copied.parameters(), 0.1)
    loss.backward()
    before = [param.detach().clone() for param in copied.parameters()]
    optimizer.step()
    for param, old in zip(copied.parameters(), before, strict=True):
        assert param.grad is not None and not torch.equal(param, old)
