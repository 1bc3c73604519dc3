"""Find the backward matmul that an autograd node ran in the step before, by a few comparisons.

Most matmuls of a step are backward ones of two matrices whose units are in force. What the session
finds out about each of them is the same in every step, so the first such step notes it with the
forward matmul.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_unitscale.capture.operators import MatmulRule, Sources
from lightning_unitscale.matmuls.calls import Call, call_of
from lightning_unitscale.matmuls.execute import Matmul
from lightning_unitscale.matmuls.torch_internals import current_node, graph_task

if TYPE_CHECKING:
    import weakref

# The session of the last matmul in each backward pass, which may run on several threads.
LATEST: dict[int, weakref.ref[Any]] = {}


def is_pair(rule: MatmulRule) -> bool:
    """Check whether a rule is of a call that has two matrices or batches and nothing else."""
    return rule.operands == (0, 1) and not (rule.addends or rule.sources or rule.mask is not None)


def note_visit(call: Call, rule: MatmulRule, sources: Sources, matmul: Matmul) -> None:
    """Note a backward matmul whose saved operand is at the address that the forward one read."""
    if is_pair(rule) and len(call.operands) == 2 and sources.count(None) == 1:
        place = 1 if sources[0] is None else 0
        saved = sources[place]
        call.matmul.visits[call.num_visits] = rule, place, saved, matmul


def steady_matmul(rule: MatmulRule, first: Tensor, second: Tensor) -> Matmul | None:
    """Return the prepared matmul of the running autograd node, ``None`` if anything differs."""
    node = current_node()
    recorded = None if node is None else call_of(node)
    session = None if recorded is None else recorded[0]()
    if session is None or recorded is None or LATEST.get(graph_task()) is not session.ref:
        return None
    call = recorded[1]
    forward = call.matmul
    visit = forward.visits.get(call.num_visits + 1)
    if visit is None or session.counter is not None or torch.is_grad_enabled():
        return None
    known_rule, place, saved, matmul = visit
    site, units = forward.site, session.units
    # Another unit of an operand or of the gradient makes the session prepare another forward one.
    if known_rule is not rule or site.matmul is not forward:
        return None
    if site.plain or units.is_looking or not units.is_used:
        return None
    # The other one must be the gradient, which is neither of the operands.
    held, other = first.data_ptr(), second.data_ptr()
    if place:
        held, other = other, held
    (_, _, one, _), (_, _, two, _) = call.operands
    if held != (two if saved else one) or other in (one, two):
        return None
    call.num_visits += 1
    return matmul
