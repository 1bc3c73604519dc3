"""Learning rates per parameter, without the optimizer's groups being anything but the user's.

While an optimizer steps, a stand-in takes its place: an object of a subclass of its class that
shares every attribute with it but ``param_groups``, which are the user's split by equal factor.
``Optimizer.step`` runs its hooks and then calls the class's ``step`` with the arguments that the
hooks return, the optimizer itself among them (``torch.optim.Optimizer.profile_hook_step``, so since
torch 2.0 and still in 2.13): the pre-hook returns the stand-in. Nothing of the user's is ever
exchanged, so there is nothing to put back when a step raises.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.transforms.learning_rates import (
    Method,
    RateFactors,
    check_group,
    check_method,
    is_decay_decoupled,
    rate_factors,
    rate_notes,
)
from lightning_unitscale.transforms.parameter_info import ParameterInfo

Group = dict[str, Any]

_UNSCALED = RateFactors()
# Where the optimizer keeps its ScaledStep. Optimizers pickle and copy their state and groups only,
# so a copy is a plain optimizer.
_ATTRIBUTE = "_lightning_unitscale_scaled_step"
# Set anew for every part, so what an optimizer writes there could not be given back.
_SCALED = ("lr", "weight_decay", "eps", "lr_scale")
_MISSING = object()


def scale_learning_rates(
    optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
) -> ScaledStep:
    """Let an optimizer step with each parameter's own learning rate and weight decay.

    ``optimizer.param_groups`` stays as the user and the schedulers made it, at all times: what
    they, the closure, the learning-rate monitor and checkpoints see is unchanged. Attaching again
    replaces what was attached before. A parameter that is not in ``infos`` keeps its rate. Copies
    of the optimizer (``deepcopy``, pickle) are plain ones.

    Args:
        optimizer: A torch optimizer itself, not a wrapper of it.
        infos: What is known of the parameters.
        method: ``"match"`` keeps each parameter's relative updates; ``"u-mup"`` takes the rates of
            u-muP.

    Returns:
        A handle, whose ``remove()`` ends it.

    Raises:
        ValueError: If the optimizer's rates cannot follow (see ``check_group``), or a scale in
            ``infos`` is not positive.
    """
    check_method(method)
    attached = vars(optimizer).get(_ATTRIBUTE)
    step = ScaledStep(optimizer, infos, method)
    if attached is not None:
        attached.remove()
    step.attach(optimizer)
    return step


class ScaledStep:
    """An optimizer's steps with the user's groups split by equal factor.

    Args:
        optimizer: The optimizer.
        infos: What is known of the parameters.
        method: How learning rates follow.

    Attributes:
        notes: What a user should be told about it once.
    """

    def __init__(
        self, optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
    ) -> None:
        self.notes: list[str] = []
        self._name = type(optimizer).__name__
        self._method: Method = method
        # By identity, since a tensor's own hash is slow; infos keeps the parameters alive.
        self._infos = infos
        self._known = {id(one) for one in infos}
        self._factors: dict[bool, dict[int, RateFactors]] = {}
        self._peak_rates: list[float] = []
        self._groups: list[Group] = []
        self._parts: list[tuple[Group, list[Group], list[Group]]] = []
        self._stand_in = _stand_in_for(optimizer, lambda: self._groups)
        self._removers: list[Any] = []
        for group in optimizer.param_groups:
            self._adopt(group)
        if self._factors:
            self.notes = rate_notes(optimizer, infos, method)

    def attach(self, optimizer: Optimizer) -> None:
        """Take part in the steps of the optimizer that it was made for."""
        # Within a step that the user compiles they would be traced, and torch 2.11 would go on with
        # the rates of the first step.
        self._removers = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._before)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._after)),
        ]
        vars(optimizer)[_ATTRIBUTE] = self

    def remove(self) -> None:
        """Let the optimizer step by itself again; a second call does nothing."""
        for one in self._removers:
            one.remove()
        self._removers = []
        if vars(self._stand_in).get(_ATTRIBUTE) is self:
            del vars(self._stand_in)[_ATTRIBUTE]

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer is self._stand_in:
            return None  # a step that calls its base class's, which has hooks as well
        self._split()
        _, *rest = args
        if rest and callable(rest[0]):
            rest[0] = self._then_split(rest[0])
        elif callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": self._then_split(kwargs["closure"])}
        return (self._stand_in, *rest), kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is not self._stand_in:
            self._join()

    def _then_split(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure may set rates or add a group, as Lightning's hooks within it may."""

        def run() -> Any:
            self._join()
            result = closure()
            self._split()
            return result

        return run

    def _split(self) -> None:
        self._groups = []
        self._parts = []
        groups: list[Group] = vars(self._stand_in)["param_groups"]
        for index, group in enumerate(groups):
            if index == len(self._peak_rates):
                self._adopt(group)
            split = self._split_group(group, _peak_rate(group) or self._peak_rates[index])
            self._groups += split
            if split[0] is not group:
                self._parts.append((group, split, [dict(part) for part in split]))

    def _join(self) -> None:
        """Give the user's groups what the optimizer wrote into their parts."""
        parts, self._parts = self._parts, []
        for group, split, built in parts:
            self._write_back(group, split, built)

    def _split_group(self, group: Group, peak_rate: float) -> list[Group]:
        factors = self._factors.get(is_decay_decoupled(self._stand_in, group), {})
        places: dict[int, list[int]] = {}
        of_places: dict[int, RateFactors] = {}
        for place, parameter in enumerate(group["params"]):
            one = factors.get(id(parameter), _UNSCALED)
            of_places[id(one)] = one
            places.setdefault(id(one), []).append(place)
        if all(one is _UNSCALED for one in of_places.values()):
            return [group]
        return [_part(group, some, of_places[key], peak_rate) for key, some in places.items()]

    def _adopt(self, group: Group) -> None:
        """Check a group that is new, and note the rate that its decay is relative to."""
        rate = group.get("lr")
        # Reading a tensor waits for the device, which a step must not do.
        self._peak_rates.append(_peak_rate(group, read_tensors=True) or float(rate or 0.0))
        if not any(id(one) in self._known for one in group["params"]):
            return
        family = check_group(self._stand_in, group, self._method)
        if self._factors:
            return
        # Equal factors are one object, which tells groups apart without comparing.
        shared = {_UNSCALED: _UNSCALED}
        for is_decoupled in (False, True):
            self._factors[is_decoupled] = {}
            for one, info in self._infos.items():
                made = rate_factors(info, self._method, family, is_decoupled=is_decoupled)
                self._factors[is_decoupled][id(one)] = shared.setdefault(made, made)

    def _write_back(self, group: Group, split: list[Group], built: list[Group]) -> None:
        """What was written into the parts of a group, if all have the same."""
        written = {
            name
            for part, before in zip(split, built, strict=True)
            for name, value in part.items()
            if not _is_same(before.get(name, _MISSING), value)
        }
        for name in sorted(written):
            first, *others = (part.get(name, _MISSING) for part in split)
            if name in _SCALED or not all(_is_same(first, one) for one in others):
                raise RuntimeError(
                    f"optimizer={self._name}(...): its step writes {name!r} into its groups, by "
                    "each parameter's own rate; expected one value for a group; use another "
                    "optimizer, or pass lr_scaling=None and choose the rates yourself."
                )
            group[name] = first


def _peak_rate(group: Group, *, read_tensors: bool = False) -> float | None:
    """The rate that a scheduler started from or goes up to, if it left word of it."""
    for name in ("max_lr", "initial_lr"):  # OneCycleLR's; that of all other schedulers
        rate = group.get(name)
        if rate is not None and (read_tensors or not isinstance(rate, Tensor)):
            return float(rate)
    return None


def _part(group: Group, places: list[int], factors: RateFactors, peak_rate: float) -> Group:
    """The parameters at ``places`` of a group, with all its settings and their own rates."""
    part = {**group, "lr_scale": factors.lr}
    for name in ("params", "param_names"):
        if name in group:
            part[name] = [group[name][place] for place in places]
    if factors.lr != 1:
        part["lr"] = group["lr"] * factors.lr
    if "weight_decay" in group:
        decay = factors.weight_decay
        if factors.is_decay_independent and peak_rate > 0:
            # A rate that peaks at 0 never decays anything, whatever the decay.
            decay /= peak_rate
        part["weight_decay"] = group["weight_decay"] * decay
    if factors.floor != 1 and isinstance(group.get("eps"), (tuple, list)):
        smallest_square, floor = group["eps"]
        part["eps"] = (smallest_square, floor * factors.floor)
    return part


def _stand_in_for(optimizer: Optimizer, groups: Callable[[], list[Group]]) -> Optimizer:
    """An optimizer that is ``optimizer`` in everything but its groups."""
    # A property goes before what the shared attributes hold under that name. Some optimizers free
    # what they hold when they are deleted, which is not for the stand-in to do.
    body = {"param_groups": property(lambda _: groups()), "__del__": lambda _: None}
    cls = types.new_class(
        type(optimizer).__name__, (type(optimizer),), exec_body=lambda names: names.update(body)
    )
    stand_in: Optimizer = object.__new__(cls)
    stand_in.__dict__ = optimizer.__dict__
    return stand_in


def _is_same(first: Any, second: Any) -> bool:
    if first is second:  # the rule, and the quick way; a compiled step makes numbers anew
        return True
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)
