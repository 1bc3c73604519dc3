"""Hold the plan of the rules: factors by tensor name, and the scale of each parameter."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from lightning_unitscale.arguments import check_choice, shown
from lightning_unitscale.capture.graph_nodes import ATTENTION, without_frame, without_number
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.rules.learning_rates import ParameterInfo, Role

Action = Literal["scaled", "zeroed", "left"]
OnUnknown = Literal["calibrate", "keep", "error"]
Origin = Literal["rule", "derived", "calibrated", "residual", "kept", "loss"]


@dataclass(frozen=True)
class Argument:
    """Factor on the argument of an operation at a path, such as ``(0,)`` or ``("weight",)``."""

    path: tuple[int | str, ...]
    factor: float


@dataclass(frozen=True)
class Decision:
    """Factors of one operation."""

    # Name and reads (``""`` for inputs) identify the operation in another graph.
    op: str
    reads: tuple[str, ...]
    origin: Origin
    reason: str  # with the paper section or the measured value
    output: float = 1.0
    arguments: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, float], ...] = ()  # such as a fused attention's scale

    @property
    def identity(self) -> tuple[str, tuple[str, ...]]:
        """Return the operation and its reads, which distinguish operations of the same name."""
        return self.op, self.reads

    @property
    def factors(self) -> tuple[Any, ...]:
        """Return all that the rewrite applies."""
        return self.output, self.arguments, self.kwargs

    @property
    def changes(self) -> bool:
        """Check whether there is anything to rewrite."""
        return self.factors != (1.0, (), ())


@dataclass(frozen=True)
class ParameterPlan:
    """Role of one parameter, and how its values are set once."""

    info: ParameterInfo
    action: Action
    reason: str


def key(step: str, name: str) -> str:
    """Return the key of a tensor of a step, since each step has its own names."""
    return f"{step}:{name}"


def _numbered(name: str, index: int) -> str:
    return f"{name}~{index + 1}" if index else name


def _namesakes(decisions: Mapping[str, Decision], name: str) -> Iterator[tuple[str, Decision]]:
    """Yield the decisions on all operations of one name, the first one first."""
    index = 0
    while (numbered := _numbered(name, index)) in decisions:
        yield numbered, decisions[numbered]
        index += 1


def _without_namesake(name: str) -> str:
    """Return the name of a tensor without the numbers of its frame and among its namesakes."""
    return without_frame(name.partition("~")[0])


def _without_number(name: str) -> str:
    return without_number(_without_namesake(name))


def _are_alike(
    first: tuple[str, ...],
    second: tuple[str, ...],
    shortened: Callable[[str], str] = without_frame,
) -> bool:
    """Check whether two operations may read the same tensors. Inputs have no names."""
    return len(first) == len(second) and all(
        not one or not other or shortened(one) == shortened(other)
        for one, other in zip(first, second, strict=True)
    )


def _share_one(
    first: tuple[str, ...], second: tuple[str, ...], shortened: Callable[[str], str]
) -> bool:
    """Check whether two operations read one tensor in the same place."""
    return any(
        one and shortened(one) == shortened(other)
        for one, other in zip(first, second, strict=False)
    )


@dataclass(frozen=True)
class RulePlan(Mapping[str, Decision]):
    """Decisions by step and tensor name, and plans by parameter path."""

    # Branches of a step that never run together may have operations with the same name. Later ones
    # get a number after the name.

    decisions: Mapping[str, Decision] = field(default_factory=dict)
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    # Reason why each parameter that is in no planned graph stays unscaled.
    unseen: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Decision:
        return self.decisions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    def find(self, step: str, name: str, identity: tuple[str, tuple[str, ...]]) -> Decision | None:
        """Return the decision on an operation of a step."""
        namesakes = _namesakes(self.decisions, key(step, name))
        exact = (decision for _, decision in namesakes if decision.identity == identity)
        return next(exact, None) or self._find_in_other_cut(step, name, identity)

    def _find_in_other_cut(
        self, step: str, name: str, identity: tuple[str, tuple[str, ...]]
    ) -> Decision | None:
        """Return the decision on an operation that another frame of the step had when planned."""
        # A later graph break cuts the step into frames. Their operations must keep their factors,
        # although what a frame reads from another one has no name.
        base = without_frame(name)
        if base == name:
            return None
        op, reads = identity
        found = [
            decision
            for decision in self._by_base.get(key(step, base), ())
            if decision.op == op and _are_alike(decision.reads, reads)
        ]
        if any(one.factors != found[0].factors for one in found):
            raise CaptureError.by_rules(
                step,
                f"a graph break has moved, and {base} may be any of {len(found)} operations",
                "Each has its own factors",
                "Keep what breaks the graph out of the step",
            )
        return next(iter(found), None)

    def find_alike(
        self, step: str, name: str, identity: tuple[str, tuple[str, ...]], *, is_matmul: bool
    ) -> Decision | None:
        """Return the decision on an operation that has another number in this step, if one fits."""
        # Without a loss, or with a cache, a module runs other operations, and the others are
        # counted from another start. A module that generates runs its matmuls many times.
        op, reads = identity

        def shortened(read: str) -> str:
            return read if read in self.parameters else _without_number(read)

        same = [
            decision
            for decision in self._by_kind.get(key(step, _without_number(name)), ())
            if decision.op == op
        ]
        found = [one for one in same if _are_alike(one.reads, reads, shortened)]
        if not found and is_matmul:
            # Keys and values come from a cache in only some of the steps.
            same = [one for one in same if not self.parameters.keys() & {*one.reads, *reads}]
            found = [one for one in same if _share_one(one.reads, reads, shortened)]
            if not found and f".{ATTENTION}" in name:
                found = same
        return found[0] if len({one.factors for one in found}) == 1 else None

    @functools.cached_property
    def attentions(self) -> dict[str, bool]:
        """Map the name of each attention to whether it was planned as two matmuls."""
        # torch chooses by dropout, among others, so a training step's may differ from evaluation's.
        found: dict[str, bool] = {}
        for name, decision in self.decisions.items():
            tensor = _without_namesake(name).partition(":")[2]
            if without_number(tensor).rpartition(".")[2] == ATTENTION:
                found.setdefault(tensor, decision.op != ATTENTION)  # training comes first
        return found

    @functools.cached_property
    def _by_kind(self) -> dict[str, list[Decision]]:
        """Return the decisions by key without any numbers."""
        return self._grouped(_without_number)

    @functools.cached_property
    def _by_base(self) -> dict[str, list[Decision]]:
        """Return the decisions by key without frames and numbers of namesakes."""
        return self._grouped(_without_namesake)

    def _grouped(self, shortened: Callable[[str], str]) -> dict[str, list[Decision]]:
        found: dict[str, list[Decision]] = {}
        for name, decision in self.decisions.items():
            found.setdefault(shortened(name), []).append(decision)
        return found

    def updated(self, other: RulePlan) -> RulePlan:
        """Return this plan with the additions of another one. Existing decisions stay."""
        decisions = dict(self.decisions)
        for name, decision in other.decisions.items():
            namesakes = dict(_namesakes(decisions, name))
            if all(decision.identity != namesake.identity for namesake in namesakes.values()):
                decisions[_numbered(name, len(namesakes))] = decision
        parameters = {**other.parameters, **self.parameters}
        unseen = {**self.unseen, **other.unseen}
        return RulePlan(
            decisions,
            parameters,
            {fqn: reason for fqn, reason in unseen.items() if fqn not in parameters},
        )

    def without(self, parameters: Collection[str], step: str) -> RulePlan:
        """Return the plan of one step without parameters and the decisions on what reads them."""
        kept: dict[str, Decision] = {}
        num_alike: Counter[str] = Counter()
        for name, decision in self.decisions.items():
            if name.startswith(f"{step}:") and not set(decision.reads) & set(parameters):
                base = name.partition("~")[0]
                kept[_numbered(base, num_alike[base])] = decision
                num_alike[base] += 1
        return RulePlan(
            kept,
            {fqn: one for fqn, one in self.parameters.items() if fqn not in parameters},
            {fqn: one for fqn, one in self.unseen.items() if fqn not in parameters},
        )

    def steps(self) -> set[str]:
        """Return the names of the steps that have been decided on."""
        return {name.partition(":")[0] for name in self.decisions}

    def state(self) -> dict[str, Any]:
        """Return the plan in plain types, for a checkpoint."""
        return {
            "decisions": {name: asdict(decision) for name, decision in self.decisions.items()},
            "parameters": {
                fqn: {**asdict(plan), "info": {**asdict(plan.info), "role": plan.info.role.value}}
                for fqn, plan in self.parameters.items()
            },
            "unseen": dict(self.unseen),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RulePlan:
        """Return the plan that :meth:`state` wrote."""
        decisions = {
            name: Decision(
                **{
                    **saved,
                    "reads": tuple(saved["reads"]),
                    "arguments": tuple(
                        Argument(tuple(argument["path"]), argument["factor"])
                        for argument in saved["arguments"]
                    ),
                    "kwargs": tuple(map(tuple, saved["kwargs"])),
                }
            )
            for name, saved in state["decisions"].items()
        }
        parameters = {
            fqn: ParameterPlan(
                ParameterInfo(**{**plan["info"], "role": Role(plan["info"]["role"])}),
                plan["action"],
                plan["reason"],
            )
            for fqn, plan in state["parameters"].items()
        }
        return cls(decisions, parameters, dict(state.get("unseen", {})))


def changes_alike(plan: RulePlan, name: str) -> bool:
    """Check whether a step has factors on an operation of this name, with any number."""
    alike = (plan._by_kind.get(key(step, _without_number(name)), ()) for step in plan.steps())
    return any(one.changes for decisions in alike for one in decisions)


@dataclass(frozen=True)
class RuleOptions:
    """User's options, which :func:`.unit_scale` describes."""

    residual: tuple[float, float] | None = None  # with attention, and without
    on_unknown: OnUnknown = "calibrate"
    residual_mult: float = 1.0
    residual_attn_ratio: float = 1.0
    attention_mult: float = 1.0
    activation_mult: float = 1.0
    loss_mult: float = 1.0

    def __post_init__(self) -> None:
        advice = "pass on_unknown='calibrate' to measure what no rule knows"
        choices = ("calibrate", "keep", "error")
        check_choice("on_unknown", self.on_unknown, choices, "unknown choice", advice)
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name.endswith(("_mult", "_ratio")) and not _is_factor(value):
                raise ValueError(
                    f"{option.name}={shown(value)}: not a factor. Expected a positive number. "
                    f"Pass {option.name}=1.0."
                )
        residual = self.residual
        if residual is not None and not (
            isinstance(residual, (tuple, list))
            and len(residual) == 2
            and all(map(_is_factor, residual))
        ):
            raise ValueError(
                f"residual={shown(residual)}: not a pair of weights. Expected two positive "
                "numbers, for branches with attention and for the others. Pass for example "
                "residual=(0.1, 0.7)."
            )
        for name in ("residual_mult", "residual_attn_ratio"):
            if residual is not None and getattr(self, name) != 1:
                raise ValueError(
                    f"residual={shown(residual)} with {name}={getattr(self, name)!r}: both weigh "
                    "residual branches. Expected one of the two. Leave one out."
                )


def _is_factor(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]
