"""What the rules decided: factors by tensor name, and the scale of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lightning_unitscale.transforms.parameter_info import ParameterInfo, Role

How = Literal["rule", "derived", "calibrated", "residual", "kept", "loss"]


@dataclass(frozen=True)
class Argument:
    """A factor on one argument of an operation.

    Attributes:
        path: Where the argument stands: ``(0,)``, ``("weight",)``, ``(0, 1)``.
        factor: What it is multiplied by.
    """

    path: tuple[int | str, ...]
    factor: float


@dataclass(frozen=True)
class Decision:
    """What happens to one operation.

    Attributes:
        op: Its name, to make sure that it is the same operation in another graph.
        reads: Names of the tensors that it reads, ``""`` for inputs; for the same reason.
        how: Where the factors come from.
        reason: That in words, with the paper section or the measured value.
        output: Factor on the result.
        arguments: Factors on arguments.
        kwargs: Keyword arguments that are set (a fused attention's temperature).
    """

    op: str
    reads: tuple[str, ...]
    how: How
    reason: str
    output: float = 1.0
    arguments: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, float], ...] = ()

    @property
    def changes(self) -> bool:
        """Whether there is anything to rewrite."""
        return self.output != 1.0 or bool(self.arguments) or bool(self.kwargs)


@dataclass(frozen=True)
class ParameterPlan:
    """What happens to one parameter, once.

    Attributes:
        info: Its role and its scale.
        action: ``"scaled"`` to RMS 1, ``"zeroed"``, or ``"left"``.
        reason: Why.
    """

    info: ParameterInfo
    action: Literal["scaled", "zeroed", "left"]
    reason: str


def key(step: str, name: str) -> str:
    """The key of a tensor of a step: steps have names of their own."""
    return f"{step}:{name}"


@dataclass(frozen=True)
class RulePlan(Mapping[str, Decision]):
    """Decisions by step and tensor name, and plans by parameter path.

    Attributes:
        decisions: What happens to each operation, by :func:`key`.
        parameters: What happens to each parameter.
    """

    decisions: Mapping[str, Decision] = field(default_factory=dict)
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Decision:
        return self.decisions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    def updated(self, other: RulePlan) -> RulePlan:
        """This plan and what another one has besides: what is decided stays."""
        return RulePlan(
            {**other.decisions, **self.decisions}, {**other.parameters, **self.parameters}
        )

    def steps(self) -> set[str]:
        """Names of the steps that have been decided on."""
        return {name.partition(":")[0] for name in self.decisions}

    def state(self) -> dict[str, Any]:
        """The plan in plain types, for a checkpoint."""
        return {
            "decisions": {name: asdict(one) for name, one in self.decisions.items()},
            "parameters": {
                fqn: {
                    "action": one.action,
                    "reason": one.reason,
                    "info": {**asdict(one.info), "role": one.info.role.value},
                }
                for fqn, one in self.parameters.items()
            },
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RulePlan:
        """The plan that :meth:`state` wrote."""
        decisions = {}
        for name, one in state["decisions"].items():
            arguments = tuple(
                Argument(tuple(given["path"]), given["factor"]) for given in one["arguments"]
            )
            decisions[name] = Decision(
                **{
                    **one,
                    "reads": tuple(one["reads"]),
                    "arguments": arguments,
                    "kwargs": tuple((key, value) for key, value in one["kwargs"]),
                }
            )
        parameters = {
            fqn: ParameterPlan(
                ParameterInfo(**{**one["info"], "role": Role(one["info"]["role"])}),
                one["action"],
                one["reason"],
            )
            for fqn, one in state["parameters"].items()
        }
        return cls(decisions, parameters)

    def with_parameters(self, parameters: Mapping[str, ParameterPlan]) -> RulePlan:
        """The plan with other plans for its parameters."""
        return replace(self, parameters=dict(parameters))


@dataclass(frozen=True)
class RuleOptions:
    """The choices that a user has.

    Attributes:
        residual: Weights of residual branches with and without attention; the u-muP depth rule
            by default.
        on_unknown: ``"calibrate"``, ``"keep"`` or ``"error"``.
        residual_mult: u-muP's share of all branches.
        residual_attn_ratio: u-muP's share of attention branches.
        attention_mult: Factor on attention's logits.
        activation_mult: Factor on the input of activations after a weight.
        loss_mult: Factor on the logits of a cross-entropy.
    """

    residual: tuple[float, float] | None = None
    on_unknown: Literal["calibrate", "keep", "error"] = "calibrate"
    residual_mult: float = 1.0
    residual_attn_ratio: float = 1.0
    attention_mult: float = 1.0
    activation_mult: float = 1.0
    loss_mult: float = 1.0
