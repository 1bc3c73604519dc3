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
    def identity(self) -> tuple[str, tuple[str, ...]]:
        """What tells it apart from decisions on other operations of its name."""
        return self.op, self.reads

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


def _numbered(name: str, index: int) -> str:
    return f"{name}~{index + 1}" if index else name


def _namesakes(decisions: Mapping[str, Decision], name: str) -> Iterator[tuple[str, Decision]]:
    """Decisions on all operations of one name, the first one first."""
    index = 0
    while (numbered := _numbered(name, index)) in decisions:
        yield numbered, decisions[numbered]
        index += 1


@dataclass(frozen=True)
class RulePlan(Mapping[str, Decision]):
    """Decisions by step and tensor name, and plans by parameter path.

    Branches of a step that never run together may have operations of one name. Those that came
    later are found under the name with a number behind it.

    Attributes:
        decisions: What happens to each operation, by :func:`key`.
        parameters: What happens to each parameter.
        unseen: Parameters that are in no graph that was planned, which stay as they are, with the
            reason.
    """

    decisions: Mapping[str, Decision] = field(default_factory=dict)
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Decision:
        return self.decisions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    def find(self, step: str, name: str, identity: tuple[str, tuple[str, ...]]) -> Decision | None:
        """What was decided on an operation of a step, by its name and by what it is."""
        found = _namesakes(self.decisions, key(step, name))
        return next((one for _, one in found if one.identity == identity), None)

    def updated(self, other: RulePlan) -> RulePlan:
        """This plan and what another one has besides: what is decided stays."""
        decisions = dict(self.decisions)
        for name, one in other.decisions.items():
            namesakes = dict(_namesakes(decisions, name))
            if all(one.identity != each.identity for each in namesakes.values()):
                decisions[_numbered(name, len(namesakes))] = one
        parameters = {**other.parameters, **self.parameters}
        unseen = {**self.unseen, **other.unseen}
        return RulePlan(
            decisions,
            parameters,
            {fqn: reason for fqn, reason in unseen.items() if fqn not in parameters},
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
            "unseen": dict(self.unseen),
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
        return cls(decisions, parameters, dict(state.get("unseen", {})))

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
