"""Step an optimizer with learning rates and decays per parameter, with unchanged groups.

While an optimizer steps, a stand-in takes its place. It is an object of a subclass of its class
that shares every attribute but ``param_groups``, which are the user's split by equal settings.
``Optimizer.step`` runs its hooks and then calls the class's ``step`` with the arguments that the
hooks return (``torch.optim.Optimizer.profile_hook_step``, since torch 2.0 and still in 2.13). The
pre-hook returns the stand-in as the optimizer. No object of the user is replaced, so nothing must
be restored when a step raises.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.arguments import check_choice
from lightning_unitscale.rules.learning_rates import (
    METHODS,
    Family,
    Method,
    ParameterInfo,
    RateFactors,
    check_group,
    family_of,
    is_decay_decoupled,
    rate_factors,
)
from lightning_unitscale.rules.muon import give_roles

Group = dict[str, Any]
_NEUTRAL = RateFactors()

# Attribute of an optimizer for its ScaledStep. Optimizers pickle and copy their state and groups
# only, so a copy is an ordinary optimizer.
_ATTRIBUTE = "_lightning_unitscale_scaled_step"
# Set for every part, so values that an optimizer writes there could not be written back.
_SCALED = ("lr", "weight_decay", "eps", "lr_scale")
_MISSING = object()


def scale_learning_rates(
    optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
) -> ScaledStep:
    """Let an optimizer step with each parameter's own learning rate and weight decay."""
    # `optimizer.param_groups` always stays as the user and the schedulers made it. So they, the
    # closure, the learning-rate monitor and checkpoints see no change. Attaching again changes the
    # earlier attachment, also in the middle of a step. A parameter that is not in `infos` keeps its
    # rate. Copies of the optimizer (`deepcopy`, pickle) are ordinary ones.
    advice = "pass 'match' to keep each parameter's relative updates"
    check_choice("lr_scaling", method, METHODS, "unknown method", advice)
    attached = vars(optimizer).get(_ATTRIBUTE)
    if attached is None or attached.method != method:
        return ScaledStep(optimizer, infos, method)
    attached.follow(infos)
    return attached


class ScaledStep:
    """Steps of an optimizer with each parameter's own rate. See :func:`scale_learning_rates`."""

    def __init__(
        self, optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
    ) -> None:
        self._name = type(optimizer).__name__
        self._groups: list[Group] = []
        self._parts: list[tuple[Group, list[Group], list[Group]]] = []
        self._stand_in = _stand_in_for(optimizer, lambda: self._groups)
        self._removers: list[Any] = []
        self.method: Method = method
        self._infos = infos
        # By identity, since a tensor's own hash is slow. ``infos`` keeps its parameters alive. All
        # others have no factors, so a new one may take the identity of an old one.
        # The key is whether decay is decoupled, and Muon's own rule for shapes.
        self._factors: dict[tuple[bool, str | None], dict[int, RateFactors]] = {}
        give_roles(optimizer, infos)
        self._peak_rates: list[float] = []
        for group in optimizer.param_groups:
            self._adopt(group)
        attached = vars(optimizer).get(_ATTRIBUTE)
        if attached is not None:
            attached.remove()
        # In a step that the user compiles they would be traced, and torch 2.11 would keep the
        # settings of the first step.
        self._removers = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._before)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._after)),
        ]
        vars(optimizer)[_ATTRIBUTE] = self

    def follow(self, infos: Mapping[Tensor, ParameterInfo]) -> None:
        """Step with the rates of other parameters, from the next split of the groups on."""
        give_roles(self._stand_in, infos)
        self._infos = infos
        self._factors.clear()

    def remove(self) -> None:
        """Restore the optimizer's own step. A second call does nothing."""
        for handle in self._removers:
            handle.remove()
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
        """Split the groups after the closure, which may set rates or add a group."""

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
            positions: dict[RateFactors, list[int]] = {}
            for position, factors in enumerate(self._factors_of(group, index)):
                positions.setdefault(factors, []).append(position)
            if positions.keys() <= {_NEUTRAL}:
                self._groups.append(group)
                continue
            parts = [
                _part(group, chosen, self._settings(group, index, factors))
                for factors, chosen in positions.items()
            ]
            self._groups += parts
            self._parts.append((group, parts, [dict(part) for part in parts]))

    def _join(self) -> None:
        """Give the user's groups the values that the optimizer wrote into all of their parts."""
        split, self._parts = self._parts, []
        for group, parts, built in split:
            written = {
                name
                for part, before in zip(parts, built, strict=True)
                for name, value in part.items()
                if not _is_same(before.get(name, _MISSING), value)
            }
            for name in sorted(written):
                first, *others = (part.get(name, _MISSING) for part in parts)
                if name in _SCALED or not all(_is_same(first, value) for value in others):
                    raise RuntimeError(
                        f"optimizer={self._name}(...): its step writes {name!r} into its groups, "
                        "by each parameter's own settings. Expected one value for a group. Use "
                        "another optimizer, or pass lr_scaling=None and choose the rates yourself."
                    )
                group[name] = first

    def _factors_of(self, group: Group, index: int) -> list[RateFactors]:
        """Return factors on the settings of each parameter. A new group is checked first."""
        if index == len(self._peak_rates):
            self._adopt(group)
        key = is_decay_decoupled(self._stand_in, group), group.get("adjust_lr_fn")
        known = self._factors.setdefault(key, {})
        for param in group["params"]:
            if id(param) not in known:
                known[id(param)] = self._factors_for(param, *key)
        return [known[id(param)] for param in group["params"]]

    def _factors_for(
        self, param: Tensor, is_decoupled: bool, adjust_lr_fn: str | None
    ) -> RateFactors:
        if param not in self._infos:
            return _NEUTRAL
        return rate_factors(
            self._infos[param],
            self.method,
            family_of(self._stand_in),
            is_decoupled=is_decoupled,
            shape=param.shape,
            adjust_lr_fn=adjust_lr_fn,
        )

    def _settings(self, group: Group, index: int, factors: RateFactors) -> dict[str, Any]:
        """Return rate, decay and, for Adafactor, the smallest RMS of a parameter."""
        settings: dict[str, Any] = {"lr_scale": factors.lr}
        if factors.lr != 1:
            settings["lr"] = group["lr"] * factors.lr
        if "weight_decay" in group:
            decay = factors.weight_decay
            peak = _peak_rate(group) or self._peak_rates[index]
            if factors.is_decay_independent and peak > 0:
                # A rate that peaks at 0 never decays anything, whatever the decay.
                decay /= peak
            settings["weight_decay"] = group["weight_decay"] * decay
        if factors.floor != 1 and isinstance(group.get("eps"), (tuple, list)):
            smallest_square, floor = group["eps"]
            settings["eps"] = (smallest_square, floor * factors.floor)
        return settings

    def _adopt(self, group: Group) -> None:
        """Check a new group, and record the rate that its decay is relative to."""
        self._peak_rates.append(first_peak_rate(group))
        if not any(param in self._infos for param in group["params"]):
            return
        check_group(self._stand_in, group, self.method)
        self._factors_of(group, len(self._peak_rates) - 1)


def first_peak_rate(group: Group) -> float:
    """Return a new group's peak rate, or else its present rate. This waits for the device."""
    return _peak_rate(group, read_tensors=True) or float(group.get("lr") or 0.0)


def _peak_rate(group: Group, *, read_tensors: bool = False) -> float | None:
    """Return the rate that a scheduler started from or goes up to, if it recorded it."""
    for name in ("max_lr", "initial_lr"):  # OneCycleLR's, and that of all other schedulers
        rate = group.get(name)
        if rate is not None and (read_tensors or not isinstance(rate, Tensor)):
            return float(rate)
    return None


def _part(group: Group, positions: list[int], settings: dict[str, Any]) -> Group:
    """Return the parameters at ``positions`` of a group, with their own settings."""
    part = {**group, **settings}
    for name in ("params", "param_names"):
        if name in group:
            part[name] = [group[name][position] for position in positions]
    return part


def _stand_in_for(optimizer: Optimizer, groups: Callable[[], list[Group]]) -> Optimizer:
    """Return a stand-in that equals ``optimizer`` in everything but its groups."""
    # A property goes before a shared attribute of that name. Some optimizers free their resources
    # when they are deleted, which the stand-in must not do.
    body = {"param_groups": property(lambda _: groups()), "__del__": lambda _: None}
    cls = types.new_class(
        type(optimizer).__name__, (type(optimizer),), exec_body=lambda names: names.update(body)
    )
    stand_in: Optimizer = object.__new__(cls)
    stand_in.__dict__ = optimizer.__dict__
    return stand_in


def _is_same(first: Any, second: Any) -> bool:
    if first is second:  # the rule, and the quick way, since a compiled step makes new numbers
        return True
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


# A larger share of a weight in every step is a decay meant for AdamW's convention.
_LARGE_DECAY = 2.0**-8
# A u-muP rate below this is probably a mistake, since the paper searches from 2**-2 up.
_SMALL_RATE = 2.0**-6


def rate_notes(
    optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
) -> list[str]:
    """Return messages about unusual rates of an optimizer."""
    name = type(optimizer).__name__
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(param in infos for param in parameters):
        return []
    family, notes = family_of(optimizer), []
    if family is Family.LINEAR and method == "match":
        notes.append(
            f"lr_scaling='match': the steps of {name} are as large as the gradient. Unit "
            "scaling changes that, so no rate restores the steps. The rates of u-muP are used. "
            "Tune its learning rate."
        )
    if isinstance(optimizer, torch.optim.RAdam):
        notes.append(
            f"{name}: its first steps are not normalized. With gradients at unit scale they "
            "are as large as later ones. Use a warm-up."
        )
    notes += [
        f"{info.fqn}: tied to a second role. Its rate is that of role {info.role.value!r}."
        for info in (infos[param] for param in parameters if param in infos)
        if info.is_tied
    ]
    decays = [float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups]
    if method == "u-mup" and max(decays, default=0.0) > _LARGE_DECAY:
        notes.append(
            f"lr_scaling='u-mup': weight_decay={max(decays):g} is independent of the learning "
            f"rate. Weights shrink by {max(decays):.1%} in every step at the peak rate. u-muP's "
            "own choice is 2**-13."
        )
    rate = max(first_peak_rate(group) for group in optimizer.param_groups)
    is_adam = family in (Family.SCALE_INVARIANT, Family.BY_ROLE)
    if method == "u-mup" and is_adam and 0 < rate < _SMALL_RATE:
        notes.append(
            f"lr_scaling='u-mup': lr={rate:g} is far below u-muP's best rates, which are near 1, "
            "so the model learns slowly. Search from 2**-2 to 2**3, or pass lr_scaling='match' "
            "(that of method='unit-scaling') to use rates of the unscaled model."
        )
    unknown = sum(param not in infos and param.requires_grad for param in parameters)
    if unknown:
        notes.append(
            f"{name}: {unknown} of its {len(parameters)} parameters are in no scaled graph. Their "
            "rates stay unchanged."
        )
    return notes
