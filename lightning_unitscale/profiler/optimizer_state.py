"""What an optimizer adds to a step, found by letting it run on fake parameters.

No table of optimizers: any class that keeps tensors in ``state`` is measured, the user's too.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_unitscale.profiler.memory import FakeScalars

OptimizerLike = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]


def fake_optimizer(
    given: OptimizerLike,
    parameters: Iterable[nn.Parameter],
    fakes: Mapping[int, Tensor],
    device: torch.device,
) -> Optimizer:
    """An optimizer like the one given that updates fake parameters and has its state already.

    Args:
        given: An optimizer of the real parameters, or a class or function that makes one.
        parameters: The fake parameters, for a class or function.
        fakes: The fake of each real parameter, by identity, for an optimizer.
        device: Of the fake parameters.

    Raises:
        ValueError: If the optimizer updates tensors that are no parameters of the module.
        TypeError: If ``given`` makes no optimizer.
    """
    if isinstance(given, Optimizer):
        optimizer = _for_others(given, fakes, device)
    else:
        made = given([one for one in parameters if one.requires_grad])
        if not isinstance(made, Optimizer):
            raise TypeError(
                f"`optimizer={given!r}`: it made a {type(made).__name__}; expected an optimizer, "
                "its class, or a function of the parameters that returns one."
            )
        optimizer = made
    for group in optimizer.param_groups:
        # On a GPU torch takes the implementation over lists of tensors, which has other
        # temporaries; for fake tensors it would not choose it by itself.
        if device.type == "cuda" and group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    _make_state(optimizer)
    return optimizer


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Every tensor that the optimizer keeps between steps."""
    state = [dict(one) for one in optimizer.state.values()]
    return [one for one in tree_leaves(state) if isinstance(one, Tensor)]


def _for_others(given: Optimizer, fakes: Mapping[int, Tensor], device: torch.device) -> Optimizer:
    """A copy of an optimizer, settings and all, for the fakes of its parameters."""

    def fake(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        # Counts of steps stay on the CPU.
        where = device if one.dim() else "cpu"
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=where)

    copy: Optimizer = object.__new__(type(given))
    copy.__dict__.update(given.__dict__)
    # A scheduler leaves its own ``step`` on the object, which would move the schedule.
    copy.__dict__.pop("step", None)
    # What it holds already: some make their state before the first step.
    copy.state = defaultdict(dict)
    for parameter, state in given.state.items():
        copy.state[_fake_of(parameter, fakes)] = tree_map(fake, dict(state))
    for name in [one for one in copy.__dict__ if one.endswith("_hooks")]:
        copy.__dict__[name] = OrderedDict()
    copy.param_groups = [
        {**group, "params": [_fake_of(one, fakes) for one in group["params"]]}
        for group in given.param_groups
    ]
    return copy


def _fake_of(parameter: Tensor, fakes: Mapping[int, Tensor]) -> Tensor:
    if id(parameter) not in fakes:
        raise ValueError(
            f"`optimizer`: it updates a tensor of shape {tuple(parameter.shape)} that is no "
            "parameter of the module; expected an optimizer of the module's own parameters; make "
            "it anew if the module was copied or converted since."
        )
    return fakes[id(parameter)]


def _make_state(optimizer: Optimizer) -> None:
    """Let the optimizer make the state that it has from the first step on."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    with FakeScalars():
        for one in parameters:
            if one.requires_grad:
                one.grad = torch.zeros_like(one)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
