"""Parameters whose memory is freed: their metadata, their errors, and their return."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.pipeline.balance import balanced_split
from lightning_unitscale.pipeline.data_parallel import Replicas
from lightning_unitscale.pipeline.rank_parameters import FreedParameter, FreedStorage, Owners
from lightning_unitscale.pipeline.stage_owners import Ownership

READS: dict[str, Callable[[nn.Module, nn.Parameter], Any]] = {
    "an operation": lambda module, one: one + 1,
    "a method": lambda module, one: one.sum(),
    "a number": lambda module, one: one.tolist(),
    "an item": lambda module, one: one[0],
    "a view": lambda module, one: one.T,
    "its data": lambda module, one: one.data,
    "detached": lambda module, one: one.detach(),
    "a write": lambda module, one: one.mul_(2),
    "the layer": lambda module, one: module(torch.ones(2, 4)),
    "a state dict": lambda module, one: module.state_dict(),
    "a copy": lambda module, one: copy.deepcopy(module),
    "a pickle": lambda module, one: pickle.dumps(module),
    "a move": lambda module, one: module.cpu(),
}


def _freed(module: nn.Linear) -> FreedStorage:
    freed = FreedStorage({"weight": module.weight}, [module.bias])
    freed.free()
    return freed


@pytest.mark.parametrize("read", READS)
def test_reading_freed_parameter_is_an_error(read: str) -> None:
    module = nn.Linear(4, 4)
    _freed(module)
    # Otherwise this is a segmentation fault.
    with pytest.raises(RuntimeError, match="are on another rank of the pipeline"):
        READS[read](module, module.weight)


def test_freed_parameter_keeps_metadata() -> None:
    module = nn.Linear(4, 3)
    one = module.weight
    one.grad = torch.ones(3, 4)
    _freed(module)
    assert isinstance(one, nn.Parameter)
    assert one.untyped_storage().nbytes() == 0
    assert one.shape == (3, 4) and one.numel() == 12 and one.dtype == torch.float32
    assert one.grad is None and one.requires_grad and one.is_leaf
    assert {one: 1}[one] == 1
    assert repr(one) == "FreedParameter((3, 4), torch.float32, cpu)"


def test_optimizer_skips_freed_parameter() -> None:
    module = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    freed = _freed(module)
    module.bias.grad = torch.ones(4)
    before = module.bias.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(module.bias, before)
    assert list(optimizer.state) == [module.bias]
    freed.take()
    module.weight.data.fill_(1.0)
    assert torch.equal(module(torch.ones(1, 4)), module.bias[None] + 4)


def test_parameters_can_be_taken_and_freed_again() -> None:
    module = nn.Linear(4, 4)
    freed = _freed(module)
    freed.take()
    assert type(module.weight) is nn.Parameter
    assert module.weight.untyped_storage().nbytes() == 64
    with freed.plain():
        freed.free()
    freed.take()
    freed.free()
    with freed.plain():
        assert type(module.weight) is nn.Parameter
    assert type(module.weight) is FreedParameter


def test_lost_parameters_are_nan() -> None:
    module = nn.Linear(4, 4)
    freed = _freed(module)
    freed.lose()
    assert module.weight.isnan().all() and not module.bias.isnan().any()
    freed.lose()
    freed.take()
    assert not freed.is_free


def test_shared_memory_is_not_freed() -> None:
    whole = torch.randn(8)
    views = {name: nn.Parameter(one) for name, one in zip("ab", whole.split(4), strict=True)}
    own, kept = nn.Parameter(torch.randn(4)), torch.randn(4)
    other = nn.Parameter(kept)
    freed = FreedStorage({**views, "own": own, "other": other}, [kept])
    assert freed.parameters == {"own": own}
    freed.free()
    assert views["a"].sum() == whole[:4].sum()


def test_state_outlives_freed_memory() -> None:
    module = nn.Linear(4, 4)
    freed = FreedStorage({"weight": module.weight}, [module.bias])
    state: dict[str, Tensor] = {**module.state_dict(), "tied": module.state_dict()["weight"]}
    expected = module.weight.detach().clone()
    state = freed.copied(state)
    freed.free()
    assert torch.equal(state["weight"], expected)
    assert state["tied"] is state["weight"]
    assert state["bias"].data_ptr() == module.bias.data_ptr()


@pytest.mark.usefixtures("process_group")
def test_clipping_uses_norm_over_all_ranks() -> None:
    module = nn.Linear(4, 4)
    gradients = [torch.randn_like(one) for one in module.parameters()]
    for one, gradient in zip(module.parameters(), gradients, strict=True):
        one.grad = gradient.clone()
    ownership = Ownership(module, 1, lambda stage: 0, balanced_split(1))
    ownership.adopt((1, dict.fromkeys(("weight", "bias"), frozenset({0}))))
    owners = Owners(module, ownership, None, Replicas(None, 0, 1))
    owners.clip_norm(module.parameters(), 0.5)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    clipped = torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None])
    assert torch.allclose(clipped, flat * 0.5 / torch.linalg.vector_norm(flat))
