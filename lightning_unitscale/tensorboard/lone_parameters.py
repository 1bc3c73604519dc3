"""Find the trained parameters that only one of two runs reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_unitscale.tensorboard.history import RunScales


def lone_parameters(runs: Sequence[RunScales]) -> dict[int, set[str]]:
    """Return the trained parameters that only one run reads, by step."""
    graphs = [run.inputs_at("forward") for run in runs]
    trained = [_trained(run) for run in runs]
    known: dict[tuple[int, int], set[str]] = {}
    found: dict[int, set[str]] = {}
    for step in graphs[0].keys() & graphs[1].keys():
        at = [graph[step] for graph in graphs]
        key = id(at[0]), id(at[1])
        if key not in known:
            known[key] = set()
            for side, (own, other) in enumerate((at, at[::-1])):
                lone = _read_alone(own, other) & trained[side]
                known[key] |= {name for name in lone if _is_recorded(runs[1 - side], name)}
        found[step] = known[key]
    return found


def _read_alone(
    own: Mapping[str, tuple[str, ...]], other: Mapping[str, tuple[str, ...]]
) -> set[str]:
    """Return the sources of one graph that shared tensors read, where nothing else differs."""
    found: set[str] = set()
    for name in own.keys() & other.keys():
        if not other[name] or set(own[name]) <= other.keys():
            continue
        seen, pending = set(), list(own[name])
        while pending:
            if (read := pending.pop()) not in seen:
                seen.add(read)
                pending += () if read in other else own[read]
        if {read for read in seen if read in other} == set(other[name]):
            found |= {read for read in seen if not (read in other or own[read])}
    return found


def _trained(run: RunScales) -> set[str]:
    """Return the tensors that have a gradient."""
    is_absent = np.isnan(run.history("backward").log2_rms)
    return {name for k, name in enumerate(run.names) if not is_absent[:, k].all()}


def _is_recorded(run: RunScales, name: str) -> bool:
    """Return whether a monitor that would see a parameter has recorded the run."""
    # A monitor may leave out all biases, or all of a module.
    module, _, own = name.rpartition(".")
    endings = {each.rpartition(".")[2] for each in run.names}
    return name in run.names or (module in run.modules and own in endings)
