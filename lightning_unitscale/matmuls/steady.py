"""Find a matmul that ran before, in the same place and with operands of the same kind.

The session finds the same properties of a matmul in every step: its module, its name, its
units, and for a backward matmul which operands autograd saved. So when a matmul has run in its
units, it is noted: a forward one by its module and the instruction that calls it, a backward one
by the number of matmuls that its autograd node ran before it. The functions here return the
noted matmul if a few comparisons show that the session would find the same. Otherwise they
return ``None``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from lightning_unitscale.capture.copy_graphs import LINES
from lightning_unitscale.capture.operators import MatmulRule, Sources
from lightning_unitscale.matmuls.autograd_nodes import latest_key
from lightning_unitscale.matmuls.calls import WATCHED, Call, call_of, record
from lightning_unitscale.matmuls.compiler_internals import codes
from lightning_unitscale.matmuls.execute import (
    MAX_PLACEMENTS,
    Again,
    BackwardMatmul,
    Matmul,
    placement_of,
    prepare_again,
)
from lightning_unitscale.matmuls.measurement import Site
from lightning_unitscale.matmuls.sites import Sites
from lightning_unitscale.matmuls.torch_internals import (
    CHECKPOINT,
    ENGINE,
    MODULE_CALL,
    MODULE_CALLS,
    OPERATOR_CALL,
    Kernel,
    current_node,
    graph_task,
    saving_hooks,
)

# The session of the last matmul in each backward pass, which may run on several threads.
LATEST: dict[int, weakref.ref[Any]] = {}

# Code between a matmul and the call of its module that says nothing about its place, by identity.
# Of code that a module's call runs as the module's method: the name of its first argument.
_ORDINARY: dict[int, str] = {}
# In place of the identity of the root module, whose methods are called by stand-ins.
_ROOT = 0
_SPECIAL = frozenset(map(id, (ENGINE, CHECKPOINT, OPERATOR_CALL))) | MODULE_CALLS


def note_forward(
    sites: Sites,
    matmul: Matmul,
    original: Kernel,
    args: Sequence[Any],
    frame: FrameType | None,
) -> None:
    """Note a forward matmul of a module's call that runs with the units in force."""
    rule, site = matmul.rule, matmul.site
    # A scaled matmul alone is noted. Only then its operands may be read again.
    if site.plain or rule.mask is not None or rule.sources:
        return
    at, compilers, boundary = frame, codes() or (), sites.boundary
    chain = []
    while at is not None and (code := at.f_code) is not MODULE_CALL and code is not boundary:
        if id(code) in _SPECIAL or id(code) in LINES or code in compilers:
            return
        chain.append(code)
        at = at.f_back
    if frame is None or at is None:
        return
    module = _ROOT if at.f_code is boundary else id(at.f_locals["self"])
    if ("" if module == _ROOT else sites.paths.get(module)) != site.module:
        return
    for code in chain:
        if id(code) not in _ORDINARY:
            _ORDINARY[id(code)] = ""
            # Not kept, since what Dynamo compiled lives as long as the code that runs it.
            weakref.finalize(code, _ORDINARY.pop, id(code), None).atexit = False
    names = chain[0].co_varnames if len(chain) == 1 else ()
    if names and id(frame.f_locals.get(names[0])) == module:
        _ORDINARY[id(chain[0])] = names[0]
    sites.called[module, frame.f_lasti] = sites.kinds[site.module, site.word]
    prepare_again(matmul, original, args, placement_of(rule.operands_in(args))[0])


def _module_of(frame: FrameType, call: FrameType) -> int:
    """Return the identity of the module that calls a matmul from a frame, below its own call."""
    if call.f_code is not MODULE_CALL:
        return _ROOT
    # The time to read a frame's variables grows with their number, and torch's code has many.
    if frame.f_back is call and (name := _ORDINARY.get(id(frame.f_code))):
        return id(frame.f_locals.get(name))
    return id(call.f_locals["self"])


def steady_forward(
    session: Any, rule: MatmulRule, args: Sequence[Any], frame: FrameType
) -> Again | None:
    """Return the noted forward matmul of the running session, and record it for its backward."""
    if session.counter is not None or session.units.is_looking or current_node() is not None:
        return None
    sites = session.sites
    at: FrameType | None = frame
    boundary = sites.boundary
    while at is not None and (code := at.f_code) is not MODULE_CALL and code is not boundary:
        if id(code) not in _ORDINARY:
            return None
        at = at.f_back
    if at is None:
        return None
    kind = sites.called.get((_module_of(frame, at), frame.f_lasti))
    if kind is None:
        return None
    index = kind.next_index(sites.episode)
    if index >= len(kind.sites):
        return None
    site = kind.sites[index]
    matmul = site.matmul
    if matmul is None or matmul.rule is not rule:
        return None
    if not torch.is_grad_enabled() or saving_hooks(True) is not None or WATCHED.see is not None:
        return None
    operands = rule.operands_in(args)
    placement, addresses = placement_of(operands)
    again: Again | None = matmul.again.get(placement)
    # The names of these operators depend on nothing else, and their addend is not optional.
    is_same = rule.with_factor or rule.temperature is not None
    if again is None or not (is_same or _is_same(rule, args, site, again)):
        return None
    kind.count = index + 1
    if (key := latest_key(operands)) is not None:
        needs_gradient = [tensor.requires_grad for tensor in operands]
        visits = matmul.visits_of(placement)
        record(key, session.ref, Call(matmul, placement, addresses, needs_gradient, visits))
    return again


def _is_same(rule: MatmulRule, args: Sequence[Any], site: Site, again: Again) -> bool:
    """Check that a call has the name of the noted one, and addends in the same places."""
    return rule.word(args)[0] == site.word and rule.addends_in(args) == again.addends


def is_pair(rule: MatmulRule) -> bool:
    """Check whether a rule is of a call that has two matrices or batches and nothing else."""
    return rule.operands == (0, 1) and not (rule.addends or rule.sources or rule.mask is not None)


def _place_of_saved(call: Call, sources: Sources, addresses: Sequence[int]) -> int | None:
    """Return which of two operands is saved, if addresses alone show that it is the only one."""
    place = 1 if sources[0] is None else 0
    saved, known = sources[place], call.addresses
    if saved is None or sources.count(None) != 1 or len(known) != 2:
        return None
    is_clear = addresses[place] == known[saved] and addresses[1 - place] not in known
    return place if is_clear else None


def note_backward(
    call: Call,
    rule: MatmulRule,
    sources: Sources,
    matmul: Matmul,
    original: Kernel,
    args: Sequence[Any],
) -> None:
    """Note a backward matmul that runs with the units in force."""
    forward = call.matmul
    kept = forward.backward.get((id(rule), sources))
    if kept is None or kept[1] is not matmul or matmul.site.plain:
        return
    placement, addresses = placement_of(rule.operands_in(args))
    place = None
    if not rule.sources:
        place = _place_of_saved(call, sources, addresses) if is_pair(rule) else None
        if place is None:
            return
    if len(call.visits) >= MAX_PLACEMENTS:
        call.visits.clear()
    saved = None if place is None else sources[place]
    call.visits[call.num_visits] = BackwardMatmul(rule, place, saved, matmul)
    prepare_again(matmul, original, args, placement)


def steady_backward(rule: MatmulRule, args: Sequence[Any]) -> Again | None:
    """Return the noted backward matmul of the running autograd node."""
    node = current_node()
    recorded = None if node is None else call_of(node)
    session = None if recorded is None else recorded[0]()
    if session is None or recorded is None or LATEST.get(graph_task()) is not session.ref:
        return None
    call = recorded[1]
    forward = call.matmul
    visit = call.visits.get(call.num_visits + 1)
    if visit is None or session.counter is not None or torch.is_grad_enabled():
        return None
    known_rule, place, saved, matmul = visit
    if rule.mask is not None:
        rule = rule.reading(args, {})
    # Another unit of an operand or of the gradient makes the session prepare another forward one.
    if known_rule is not rule or session.units.is_looking or forward.site.matmul is not forward:
        return None
    placement, addresses = placement_of(rule.operands_in(args))
    again: Again | None = matmul.again.get(placement)
    if again is None:
        return None
    if place is not None and saved is not None:
        # The other one must be the gradient, which is neither of the operands.
        known = call.addresses
        if addresses[place] != known[saved] or addresses[1 - place] in known:
            return None
    call.num_visits += 1
    return again
