"""Parameters, gradients and optimizer state held in units, while everybody sees true ones.

Where weights and gradients have 16 bits, a gradient of 1e-8 is zero before the optimizer sees it,
and its square long before that. In units near their RMS they lose nothing. The optimizer is told by
its settings (see ``held_optimizers``), and ``state_dict`` of the module and of the optimizers give
and take true units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unitscale.transforms.gauge import GaugePair
from lightning_unitscale.transforms.held_optimizers import (
    HeldFactors,
    check_optimizer,
    held_factors,
    kind_of,
    next_steps,
    state_power,
)
from lightning_unitscale.transforms.scaled_step import Group, ScaledStep

_UNIT = GaugePair()


class HeldParameters:
    """Holds parameters of one module, and what its optimizers know of them, in units.

    Args:
        module: The module.
        optimizers: All optimizers of its parameters.
        is_running: Says whether the module runs as captured graphs at this moment, which know the
            units; anybody else who calls it is stopped.

    Raises:
        ValueError: If an optimizer is not in the table; nothing is changed then.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        is_running: Callable[[], bool] = lambda: False,
    ) -> None:
        for optimizer in optimizers:
            check_optimizer(optimizer)
        self._module = module
        self._optimizers = list(optimizers)
        self._is_running = is_running
        self._parameters = dict(module.named_parameters())
        self._units: dict[int, GaugePair] = {}
        self._shows_true = False
        self._steps: list[_HeldStep] = []
        self._handles: list[Any] = []

    @property
    def units(self) -> dict[str, GaugePair]:
        """Units in force by the parameter's name; those that are not there are 1."""
        return {
            fqn: self._units[id(one)]
            for fqn, one in self._parameters.items()
            if id(one) in self._units
        }

    def belongs_to(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are the optimizers that know of the units."""
        return [id(one) for one in optimizers] == [id(one) for one in self._optimizers]

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters whose units are known, by name."""
        return {fqn: one for fqn, one in self._parameters.items() if id(one) in self._units}

    def attach(self) -> None:
        """Let optimizers step, and state be saved and loaded, as the units demand."""
        self._steps = [_HeldStep(one, self.units_of) for one in self._optimizers]
        for step, optimizer in zip(self._steps, self._optimizers, strict=True):
            step.attach(optimizer)
            self._handles += [
                optimizer.register_state_dict_post_hook(self._true_state),
                optimizer.register_load_state_dict_pre_hook(self._held_state),
            ]
        mine = {id(one) for one in self._parameters.values()}
        for one in self._module.modules():
            if any(id(p) in mine for p in one._parameters.values()):
                self._handles += [
                    one.register_state_dict_post_hook(_converting(self, 1)),
                    one.register_load_state_dict_pre_hook(_converting(self, -1)),
                    one.register_forward_pre_hook(_stop_others(self)),
                ]

    def units_of(self, parameter: Tensor) -> GaugePair:
        """Units in which a parameter and its gradient are held."""
        return self._units.get(id(parameter), _UNIT)

    def shown_exponent(self, parameter: Tensor) -> int:
        """What a parameter's values must be multiplied by at this moment, as an exponent."""
        return 0 if self._shows_true else self.units_of(parameter).log2_sigma

    @property
    def is_closed(self) -> bool:
        """Whether a parameter's values mean something to captured graphs only."""
        return bool(self._units) and not self._shows_true and not self._is_running()

    def take(self, units: Mapping[str, GaugePair]) -> None:
        """Put units into force: exact for powers of two, as far as the types reach.

        Args:
            units: Of parameters by name; those that are not named keep theirs.
        """
        for fqn, new in units.items():
            parameter = self._parameters[fqn]
            old = self.units_of(parameter)
            _rescale(parameter, old.log2_sigma - new.log2_sigma)
            if parameter.grad is not None:
                _rescale(parameter.grad, old.log2_gamma - new.log2_gamma)
            for optimizer in self._optimizers:
                _rescale_state(optimizer, parameter, old.log2_gamma - new.log2_gamma)
            self._units[id(parameter)] = new

    def release(self) -> None:
        """Give everything back in true units; what had 16 bits of state gets 32. Idempotent."""
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                pair = self.units_of(parameter)
                state.update(_in_other_units(kind_of(optimizer), state, pair.log2_gamma))
        for parameter in self._parameters.values():
            pair = self.units_of(parameter)
            _rescale(parameter, pair.log2_sigma)
            if parameter.grad is not None:
                _rescale(parameter.grad, pair.log2_gamma)
        self._units.clear()
        for one in (*self._handles, *self._steps):
            one.remove()
        self._handles, self._steps = [], []

    @contextlib.contextmanager
    def true_values(self) -> Iterator[None]:
        """Within this context parameters have their true values, in their own type."""
        if self._shows_true:
            yield
            return
        copies = {one: one.detach().clone() for one in self.named().values()}
        for parameter in copies:
            _rescale(parameter, self.units_of(parameter).log2_sigma)
        self._shows_true = True
        try:
            yield
        finally:
            self._shows_true = False
            with torch.no_grad():
                for parameter, values in copies.items():
                    parameter.copy_(values)

    def true_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The global norm of true gradients, FP32 of shape ``()``, with torch's order of sums."""
        norms = [
            torch.linalg.vector_norm(one.grad, dtype=_wide(one.grad))
            * 2.0 ** self.units_of(one).log2_gamma
            for one in parameters
            if one.grad is not None
        ]
        if not norms:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]))

    def clip_by_norm(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        """``torch.nn.utils.clip_grad_norm_`` on true gradients."""
        norm = self.true_norm(parameters)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for one in parameters:
            if one.grad is not None:
                one.grad.detach().mul_(factor.to(one.grad.device))

    def clip_by_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        """``torch.nn.utils.clip_grad_value_`` on true gradients."""
        for one in parameters:
            if one.grad is not None:
                held = limit * 2.0 ** -self.units_of(one).log2_gamma
                one.grad.detach().clamp_(-held, held)

    def _true_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return self._converted(optimizer, state, lambda pair: pair.log2_gamma)

    def _held_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return self._converted(optimizer, state, lambda pair: -pair.log2_gamma)

    def _converted(
        self, optimizer: Optimizer, state: dict[str, Any], exponent: Callable[[GaugePair], int]
    ) -> dict[str, Any]:
        """A state dict in other units; its groups have the parameters' numbers in their order."""
        numbers = [one for group in state["param_groups"] for one in group["params"]]
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        numbered = dict(zip(numbers, parameters, strict=False))
        kind = kind_of(optimizer)
        converted = {
            key: {**one, **_in_other_units(kind, one, exponent(self.units_of(numbered[key])))}
            if key in numbered
            else one
            for key, one in state["state"].items()
        }
        return {**state, "state": converted}


class _HeldStep(ScaledStep):
    """An optimizer's steps with the user's groups split by equal units."""

    def __init__(self, optimizer: Optimizer, units_of: Callable[[Tensor], GaugePair]) -> None:
        self._units_of = units_of
        super().__init__(optimizer, {}, "match")

    def _split_group(self, group: Group, peak_rate: float) -> list[Group]:
        places: dict[HeldFactors, list[int]] = {}
        steps = next_steps(self._stand_in, group)
        for place, (parameter, step) in enumerate(zip(group["params"], steps, strict=True)):
            units = self._units_of(parameter)
            factors = HeldFactors()
            if units != _UNIT:
                factors = held_factors(self._stand_in, group, parameter, units, step)
            places.setdefault(factors, []).append(place)
        if set(places) <= {HeldFactors()}:
            return [group]
        return [_part(group, some, factors) for factors, some in places.items()]


def _part(group: Group, places: Sequence[int], factors: HeldFactors) -> Group:
    """The parameters at ``places`` of a group, with all its settings in their units."""
    part = dict(group)
    for name in ("params", "param_names"):
        if name in group:
            part[name] = [group[name][place] for place in places]
    for name in ("lr", "weight_decay", "eps"):
        if name in group:
            part[name] = group[name] * 2.0 ** getattr(factors, name)
    if "eps" in part and factors.smallest_eps:
        part["eps"] = max(part["eps"], factors.smallest_eps)
    return part


def _rescale(tensor: Tensor, exponent: int) -> None:
    """Multiply a tensor in place by a power of two, which may be none of FP32's."""
    half = exponent // 2
    for part in (half, exponent - half) if abs(exponent) > 100 else (exponent,):
        if part:
            tensor.detach().mul_(2.0**part)


def _in_other_units(kind: str, state: Mapping[str, Any], exponent: int) -> dict[str, Tensor]:
    """What of a parameter's optimizer state changes with its gradient's unit; FP16 becomes FP32."""
    changed = {}
    for name, value in state.items():
        is_tensor = isinstance(value, Tensor) and value.is_floating_point()
        power = state_power(kind, name) if is_tensor else 0
        if power and exponent:
            changed[name] = value.to(_wide(value), copy=True)
            _rescale(changed[name], power * exponent)
    return changed


def _rescale_state(optimizer: Optimizer, parameter: Tensor, exponent: int) -> None:
    state = optimizer.state.get(parameter, {})
    for name, wide in _in_other_units(kind_of(optimizer), state, exponent).items():
        state[name].copy_(wide)


def _wide(tensor: Tensor) -> torch.dtype:
    """The type that holds true values: FP16 lacks the range."""
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype


# Functions, since torch marks what it is given as a hook.
def _converting(held: HeldParameters, sign: int) -> Callable[..., None]:
    """A hook that brings a state dict's parameters to true units (1), or to held ones (-1)."""

    def convert(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and prefix + name in state:
                exponent = held.shown_exponent(parameter)
                if exponent:
                    value = state[prefix + name]
                    state[prefix + name] = value.to(_wide(value), copy=True)
                    _rescale(state[prefix + name], sign * exponent)

    return convert


def _stop_others(held: HeldParameters) -> Callable[..., None]:
    def stop(module: nn.Module, args: Any) -> None:
        # Dynamo looks through this: what it captures knows the units.
        if torch.compiler.is_compiling() or not held.is_closed:
            return
        raise RuntimeError(
            f"{type(module).__name__} is called outside of the module's steps while its parameters "
            "are held in units; expected true values there; call it within `with "
            "callback.true_parameters():`, or pass hold_parameters=False."
        )

    return stop
