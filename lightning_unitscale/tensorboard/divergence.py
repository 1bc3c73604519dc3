"""Find the first step, tensor and direction in which two runs differ by more than chance.

A tensor is off if it differs by more than chance (``chance.py``). From the first one that is off in
a step, we go back to inputs that are suspicious, until there are none. In the backward pass the
inputs are the gradients of the tensors that read it. The last tensor is reported with its cause
(``causes.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.scales.layout import DIRECTIONS, Direction, finite
from lightning_unitscale.tensorboard.causes import ADVICE, Cause, OptimizerSteps, cause_of
from lightning_unitscale.tensorboard.chance import Judged, floors_of, judge, sums_of
from lightning_unitscale.tensorboard.history import RunScales, read_run
from lightning_unitscale.tensorboard.run_pair import RunPair

# If more parameters than this share are off, they are not the cause.
_FEW_PARAMETERS: Final = 1 / 3


@dataclass(frozen=True)
class Divergence:
    """The first difference of two runs: the object that ``compare --json`` prints."""

    diverged: bool
    step: int | None = None
    module: str | None = None  # of other causes: a module that contains all weights that are off
    tensor: str | None = None
    direction: Direction | None = None
    inherited: tuple[str, ...] = ()  # its inputs that were off already
    log2_rms: tuple[float | None, float | None] | None = None  # in either run
    chance: float | None = None  # the difference of log2 RMS that counts as chance
    cause: Cause | None = None
    text: str = ""  # for the report only

    def to_json(self) -> dict[str, Any]:
        """Return the fields that scripts read."""
        fields = asdict(self)
        del fields["text"]
        return fields | {"inherited": list(self.inherited)}


def compare_runs(run_a: str | Path, run_b: str | Path) -> Divergence:
    """Find the first step, tensor and direction in which two runs differ by more than chance.

    The runs may have other precisions, devices and parallel layouts, but sample the same steps.

    Args:
        run_a: Folder with the event files of a run that had a ``ScaleMonitor``.
        run_b: Folder of the other run.

    Returns:
        The finding. ``text`` is a report in a few lines.

    Raises:
        FileNotFoundError: If a folder has no event files.
        ValueError: If a run has no scales, or the runs share no tensor or no sampled step.
    """
    return find_divergence(read_run(run_a, "run_a"), read_run(run_b, "run_b"))


def find_divergence(a: RunScales, b: RunScales) -> Divergence:
    """Return the first step, tensor and direction in which two runs differ beyond chance."""
    pair = RunPair(a, b)
    histories = {direction: pair.history(direction) for direction in DIRECTIONS}
    judged: dict[Direction, Judged] = {}
    is_noise = np.zeros(len(pair.pairs), dtype=bool)
    for direction in reversed(DIRECTIONS):
        if (history := histories[direction]) is not None:
            sums = sums_of(pair, history, direction)
            floors = floors_of(pair, history, direction, sums)
            if direction == "backward":
                # Gradients that are rounding alone, in at least one of the steps.
                is_noise = (history.log2_rms.min(axis=0) < floors).any(axis=0)
            judged[direction] = judge(pair, history, direction, sums, floors, is_noise)
    if not judged:
        raise ValueError(
            "run_a, run_b: they share no sampled step. Expected runs that sampled at least "
            "one step in common. Sample more often, such as with every_n_steps=1."
        )
    forward = judged.get("forward")
    optimizer = None if forward is None else OptimizerSteps(pair, forward.history)
    every = np.unique(np.concatenate([one.history.steps for one in judged.values()])).tolist()
    for index, step in enumerate(every):
        has_gap = index > 0 and step - every[index - 1] > 1
        found = _first_off(pair, judged, step, has_gap=has_gap)
        cause: Cause | None = None
        module: str | None = None
        if optimizer and (moved := _moved(optimizer, judged, step, found)):
            k, module = moved
            found, cause = ("forward", k), "optimizer" if module is None else "module"
        if found is not None:
            return _report(pair, judged, step, *found, cause, module)
    shown = f"{len(every)} steps, {len(pair.pairs)} tensors"
    return Divergence(False, text=f"The runs differ by no more than chance ({shown}).")


def _first_off(
    pair: RunPair, judged: dict[Direction, Judged], step: int, *, has_gap: bool
) -> tuple[Direction, int] | None:
    """Return the direction and the position of the first pair that is off at a step."""
    candidates: list[tuple[Direction, int, float]] = []
    rows: dict[Direction, int] = {}
    for direction in DIRECTIONS:
        row = judged[direction].row(step) if direction in judged else None
        if row is None or not (judged[direction].excess[row] > 1).any():
            continue
        rows[direction], excess = row, judged[direction].excess[row]
        for k in _order(pair, direction):
            if excess[k] > 1:
                before = max((excess[j] for j in _read(pair, direction, k)), default=0.0)
                jump = excess[k] / max(before, 1.0) if math.isfinite(before) else 0.0
                candidates.append((direction, k, jump))
    if not candidates:
        return None
    off = [k for direction, k, _ in candidates if direction == "forward" and pair.pairs[k].is_state]
    num_states = sum(each.is_state for each in pair.pairs)
    direction, k, _ = candidates[0]
    if has_gap and len(off) > _FEW_PARAMETERS * num_states:
        # The fault is older than this sample, and the optimizer has spread it.
        others = [each for each in candidates if not pair.pairs[each[1]].is_source]
        direction, k, jump = max(others or candidates, key=lambda each: each[2])
        return direction, k
    one, row = judged[direction], rows[direction]
    for _ in pair.pairs:
        if one.history.is_lone[row, k]:
            break
        before = _read(pair, direction, k)
        share = one.excess[row] / one.suspicious[row]
        first = max(before, key=lambda j: share[j], default=k)
        if first == k or share[first] <= 1:
            break
        k = first
    return direction, k


def _order(pair: RunPair, direction: Direction) -> Sequence[int]:
    """Return the positions of the pairs in the order in which a step computes them."""
    numbers = range(len(pair.pairs))
    if direction == "forward":
        return numbers
    # A parameter's gradient follows that of the first tensor that reads it.
    return sorted(
        numbers,
        key=lambda k: (
            -min(pair.readers[k], default=k) + 0.5 if pair.pairs[k].is_source else -k,
            -k,
        ),
    )


def _read(pair: RunPair, direction: Direction, k: int) -> tuple[int, ...]:
    """Return the inputs of a value, or of a gradient."""
    return pair.inputs[k] if direction == "forward" else pair.readers[k]


def _at_fault(pair: RunPair, direction: Direction, k: int, is_off: npt.NDArray[np.bool_]) -> int:
    """Return the pair whose module is at fault: it, or the matmul whose gradients are off."""
    # A matmul is at fault if the gradients of its operands are off, but not that of its result.
    for reader in pair.readers[k] if direction == "backward" else ():
        # Another reader may have made the gradient of a shared operand wrong.
        operands = [
            j
            for j in pair.inputs[reader]
            if pair.pairs[j].is_operand and pair.readers[j] == (reader,)
        ]
        if k in operands and is_off[operands].sum() > 1:
            return reader
    return k


def _moved(
    optimizer: OptimizerSteps,
    judged: dict[Direction, Judged],
    step: int,
    found: tuple[Direction, int] | None,
) -> tuple[int, str | None] | None:
    """Return the parameter that an optimizer changes otherwise, or leaves out in one module."""
    if (row := judged["forward"].row(step)) is None:
        return None
    if found is not None and judged[found[0]].is_lone(step, found[1]):
        return None
    return optimizer.at_fault(row, is_off=found is not None)


def _report(
    pair: RunPair,
    judged: dict[Direction, Judged],
    step: int,
    direction: Direction,
    k: int,
    cause: Cause | None,
    module: str | None,
) -> Divergence:
    one = judged[direction]
    row = one.row(step)
    assert row is not None
    excess = one.excess[row]
    if pair.pairs[k].is_rewired:  # neither of the two is wrong, but their reader
        cause, (k, module) = "module", pair.rewired(k)
    elif cause is None:
        cause, module = cause_of(pair, judged, step, direction, k)
        if cause == "module":
            is_off = excess > np.minimum(one.suspicious[row], 1)
            module = pair.pairs[_at_fault(pair, direction, k, is_off)].module
    inherited = tuple(pair.pairs[j].name for j in _read(pair, direction, k) if excess[j] > 1)
    values = map(finite, one.history.log2_rms[:, row, k].tolist())
    result = Divergence(
        True,
        step,
        module,
        pair.pairs[k].name,
        direction,
        inherited,
        (*values,),
        finite(float(one.chance[row, k])),
        cause,
    )
    return replace(result, text="\n".join(_lines(pair, one, row, result, k)))


def _lines(pair: RunPair, one: Judged, row: int, result: Divergence, k: int) -> Iterator[str]:
    """Return the report of a finding, line by line."""
    direction = result.direction or "forward"
    gradient = "gradient of " if direction == "backward" else ""
    where = f" (module {result.module})" if result.module else ""
    if result.cause in ADVICE:
        where = f" (cause: {result.cause}{f' of {result.module}' if result.module else ''})"
    yield f"The runs diverge at step {result.step}, {direction}: {gradient}{result.tensor}{where}"
    values = one.history.log2_rms[:, row, k].tolist()
    a, b = (
        "none" if math.isnan(value) else "0" if value == -math.inf else f"2^{value:.4g}"
        for value in values
    )
    yield f"  RMS {a} and {b}, {_why(one, row, k)}"
    if result.cause in ADVICE:
        yield f"  {ADVICE[result.cause]}"
    read = _read(pair, direction, k)
    after = pair.readers[k] if direction == "forward" else pair.inputs[k]
    for title, positions in (("computed from", read), ("read by", after)):
        if positions:
            states = ", ".join(
                f"{pair.pairs[j].name} ({'off' if one.excess[row, j] > 1 else 'equal'})"
                for j in positions[:8]
            )
            yield f"  {gradient and 'gradients: '}{title} {states}"


def _why(one: Judged, row: int, k: int) -> str:
    """Return by how much a tensor is off."""
    bad = one.history.nonfinite[:, row, k].tolist()
    if one.history.is_lone[row, k]:
        return "only one run has it"
    if bad[0] != bad[1]:
        return f"only the {'first' if bad[0] else 'second'} run has NaN or infinite elements"
    text = f"{one.excess[row, k]:.3g} times what chance explains"
    return text if one.excess[row, k] > 1 else f"{text}; tensors after it differ by more"
