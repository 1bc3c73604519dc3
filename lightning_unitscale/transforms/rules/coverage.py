"""The coverage report: what the rules did with every operation and every parameter, and why."""

from __future__ import annotations

from collections import Counter

from tabulate import tabulate

from lightning_unitscale.transforms.rules.decide import ATTENTION
from lightning_unitscale.transforms.rules.plan import RulePlan
from lightning_unitscale.transforms.rules.scales import HANDS_ON


def coverage_report(plan: RulePlan) -> str:
    """Two tables, of operations and of parameters, and a summary of each.

    Every parameter of the module is in the second one, also where no graph reads it.

    Operations that only hand a tensor on (views, casts, dropout) are counted, not listed.
    """
    if not plan.decisions:
        return "The rules have seen no step yet."
    rows = []
    counts: Counter[str] = Counter()
    for name, one in plan.items():
        if one.reason == HANDS_ON:
            counts["handed on"] += 1
            continue
        counts[one.how] += 1
        arguments = ", ".join(
            f"{'.'.join(map(str, item.path))}: {item.factor:.3g}" for item in one.arguments
        )
        keywords = ", ".join(f"{key}={value:.3g}" for key, value in one.kwargs)
        output = f"{one.output:.3g}" if one.output != 1.0 else ""
        rows.append((name, one.op, one.how, output, arguments, keywords, one.reason))
    parameters = [
        (
            fqn,
            one.action,
            one.info.role.value + (" (tied)" if one.info.is_tied else ""),
            f"{one.info.fan_in} -> {one.info.fan_out}",
            one.info.num_residuals or "",
            f"{one.info.sigma:.3g}",
            one.reason,
        )
        for fqn, one in plan.parameters.items()
    ]
    parameters += [(fqn, "left", "", "", "", "", reason) for fqn, reason in plan.unseen.items()]
    actions = Counter(one.action for one in plan.parameters.values())
    actions.update(["left"] * len(plan.unseen))
    num_attentions = sum(
        one.reason.startswith(ATTENTION) and one.how != "residual"
        for one in plan.decisions.values()
    )
    return "\n\n".join(
        [
            "Operations: " + ", ".join(f"{count} {how}" for how, count in counts.items()) + ".",
            tabulate(
                rows,
                headers=("operation", "op", "how", "output", "arguments", "set", "why"),
                disable_numparse=True,
            ),
            f"Attention: {num_attentions} found, on whose logits attention_mult acts.",
            "Parameters: " + ", ".join(f"{count} {how}" for how, count in actions.items()) + ".",
            tabulate(
                parameters,
                headers=("parameter", "action", "role", "fan", "branches", "RMS before", "why"),
                disable_numparse=True,
            ),
        ]
    )
