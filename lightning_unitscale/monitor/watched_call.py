"""Watch one call of a step, with a row for each result of a torch function."""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_unitscale.capture.graph_matmuls import MATMUL_WORDS, operands_of_call
from lightning_unitscale.capture.graph_nodes import ATTENTION, ATTENTION_ROLES, unique_name
from lightning_unitscale.capture.graph_recorder import local_part
from lightning_unitscale.capture.held_inputs import version_of
from lightning_unitscale.capture.name_patterns import own_path
from lightning_unitscale.matmuls.calls import RanMatmul
from lightning_unitscale.matmuls.torch_internals import sequence_number
from lightning_unitscale.monitor.input_gradients import Gradients
from lightning_unitscale.monitor.names import (
    ALIASES,
    Caller,
    Callers,
    StartNames,
    describe_function,
    full_name,
)
from lightning_unitscale.monitor.probes import ProbedTensor
from lightning_unitscale.monitor.rows import (
    Log2Unit,
    Measuring,
    RowsOf,
    RunningFunction,
    TensorRow,
    gradient_axis,
    shown_inputs,
)
from lightning_unitscale.monitor.torch_state import is_readable, plain_functions, takes_part

_WHOLE_MODULE = frozenset({"forward", "call", "call_impl", "wrapped_call_impl", "inner"})


class WatchedCall:
    """A call of a step, with rows of the tensors that it computes."""

    def __init__(
        self,
        callers: Callers,
        start_names: StartNames,
        measuring: Measuring,
        select: Callable[[str, str], bool],
        units: Mapping[str, int],
    ) -> None:
        self.callers = callers
        # For each reentrant checkpoint, the rows that it computed without gradients, in the order
        # of recomputation.
        self.checkpoints: dict[int | None, deque[tuple[TensorRow, str]]] = defaultdict(deque)
        self.gradients = Gradients(measuring)
        # True while gradients, and recomputed results of checkpoints, are measured.
        self.is_open = True
        self._start_names = start_names
        self._measuring = measuring
        self._counts_blocks = bool(measuring.layout.block_formats)
        self._select = select
        self._units = units
        self._running: RunningFunction | None = None
        self._compiled: list[tuple[range, RunningFunction]] = []
        # The tensors that the call starts from, and those that it computes, in order.
        self.given: list[TensorRow] = []
        self.made: list[TensorRow] = []
        self._rows_of = RowsOf()
        self._seen: Counter[str] = Counter()

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        word: str,
        caller: Caller,
    ) -> Any:
        """Run a torch function that a step calls, and record its results."""
        arguments = _tensors_in(args)
        if kwargs:
            # A function does not read the tensor that it writes into, which may be uninitialized.
            arguments += _tensors_in(value for key, value in kwargs.items() if key != "out")
        if caller.again is not None:
            result = function(*args, **kwargs)
            self._note_again(_tensors_in((result,)), word, arguments, caller)
            return result
        with plain_functions():
            inputs = self._inputs(arguments, word)
            is_matmul = word in MATMUL_WORDS
            operands = operands_of_call(function, args, kwargs) if is_matmul else []
            if operands:
                self._mark_operands(operands, word)
            versions = {id(tensor): version_of(tensor) for tensor in arguments}
            running = RunningFunction(word, caller, inputs, operands or arguments)
        outer, self._running = self._running, running
        try:
            result = function(*args, **kwargs)
        finally:
            self._running = outer
        results = [result] if isinstance(result, Tensor) else _tensors_in((result,))
        with plain_functions():
            for (operand, unit, _), read in zip(running.units, running.read, strict=True):
                self._set_unit(operand, unit, *read)
            if self._counts_blocks and running.axes and not running.read:
                for operand, axis in zip(operands, running.axes, strict=True):
                    self._measure_blocks(self._only_row(operand), operand, axis, None)
            if word == "setitem":
                self._rows_of[arguments[0]] = inputs
            base = full_name(caller.path, word)
            name = self._unique(base) if results else base
            for tensor in results:
                if not isinstance(result, Tensor):
                    name = self._unique(full_name(caller.path, "getitem"))
                if versions.get(id(tensor), -1) == version_of(tensor):
                    self._hand_back(tensor, name, running)
                elif self._is_made(tensor):
                    self._note(tensor, name, running)
        return result

    def pass_by(self, arguments: Sequence[Any]) -> None:
        """Record the inputs of a function whose results are not shown."""

    def see(self, ran: RanMatmul) -> None:
        """Record a matmul of the running function."""
        self._measuring.see_spacing(ran.spacing)
        if self._running is not None:
            with plain_functions():
                self._running.see(ran)

    def see_compiled(self, frame: FrameType, nodes: range) -> None:
        """Record the results of a function that the user has compiled."""
        caller = self.callers.find(frame)
        scope = frame.f_locals
        if caller is None or caller.again is not None:
            return
        # Dynamo's own name for a whole module means nothing to users.
        word, _ = describe_function(scope.get("fn"))
        word = "compiled" if word in _WHOLE_MODULE else word
        arguments = _tensors_in((*scope.get("args", ()), *scope.get("kwargs", {}).values()))
        with plain_functions():
            running = RunningFunction(word, caller, self._inputs(arguments, word))
            arguments_seen = {id(tensor) for tensor in arguments}
            if "result" not in scope:  # its node shows when it is read
                self._compiled.append((nodes, running))
            for tensor in _tensors_in((scope.get("result"),)):
                if id(tensor) not in arguments_seen:
                    self._note(tensor, self._unique(full_name(caller.path, word)), running)

    def finish(self, module: nn.Module, output: Any) -> None:
        """Record the results of the step itself, and parameters that compiled code reads."""
        with plain_functions():
            self._inputs(_tensors_in((output,)), "")
            for tensor, rows in self._rows_of.items() if any(self._units.values()) else ():
                # At the last sample a matmul read a tensor of this name, but not at this one.
                if len(rows) == 1 and rows[0].has_unit is None and rows[0].log2_sigma:
                    rows[0].log2_sigma = 0
                    self._count_again(rows[0], tensor)
            named = {row.name for row in self.given}
            for name, parameter in module.named_parameters():
                fqn = own_path(name)
                if fqn not in named and parameter.requires_grad and is_readable(parameter):
                    path = fqn.rpartition(".")[0]
                    if self._select(fqn, path):
                        row = self._row(fqn, path, (), is_given=True)
                        # It was read by unwatched code, such as compiled code.
                        show = functools.partial(self._show, row, parameter)
                        self.gradients.measure(row, parameter, show)

    def close(self) -> None:
        """Stop measuring gradients."""
        self.is_open = False
        self.gradients.close()

    def measured(self) -> list[tuple[ProbedTensor, TensorRow]]:
        """Return the tensors that have rows, with their rows."""
        inputs = shown_inputs((*self.given, *self.made))
        return [
            (row.described(inputs[row]), row)
            for row in inputs
            if row.is_shown and row.forward is not None
        ]

    def _inputs(self, arguments: Sequence[Tensor], word: str) -> tuple[TensorRow, ...]:
        """Return the rows of a function's arguments, and make missing ones."""
        inputs: dict[TensorRow, None] = {}
        for tensor in arguments:
            if is_lazy(tensor):
                # Its gradient would have to have its present shape, which is empty.
                continue
            rows = self._rows(tensor)
            if rows is None:
                rows = self._rows_of[tensor] = self._new_rows(tensor)
            elif len(rows) == 1 and not rows[0].is_hooked and takes_part(tensor):
                rows = self._rows_of[tensor] = self._with_gradient(rows[0], tensor)
            inputs.update(dict.fromkeys(rows))
            is_hidden = len(rows) == 1 and not rows[0].is_shown
            if is_hidden and word in MATMUL_WORDS and is_readable(tensor):
                # Masks and tables of constants count if a matmul reads them. The gradient of a
                # checkpoint's result is measured when the result is recomputed.
                self._show(rows[0], tensor, with_gradient=False)
        return tuple(inputs)

    def _rows(self, tensor: Tensor) -> tuple[TensorRow, ...] | None:
        rows = self._rows_of.get(tensor)
        return () if rows is None and tensor.is_sparse else rows

    def _only_row(self, tensor: Tensor) -> TensorRow | None:
        rows: Sequence[TensorRow] = self._rows(tensor) or ()
        return rows[0] if len(rows) == 1 else None

    def _new_rows(self, tensor: Tensor) -> tuple[TensorRow, ...]:
        """Return the rows of a tensor that no watched function computed."""
        if not is_readable(tensor):
            return ()
        named = self._start_names.find(tensor)
        if named is not None:
            row = self._row(*named, (), is_given=True)
            self._show(row, tensor)
            return (row,)
        base = local_part(tensor)._base
        if base is not None and (base in self._rows_of or self._start_names.find(base)):
            return self._inputs((base,), "")
        if tensor.grad_fn is None:
            return ()
        for nodes, running in self._compiled:
            if sequence_number(tensor.grad_fn) in nodes:
                name = self._unique(full_name(running.caller.path, running.word))
                self._note(tensor, name, running)
                return self._rows(tensor) or ()
        caller = self.callers.find(sys._getframe().f_back) or Caller("")
        return (self._unseen_row(tensor, caller.path, ()),)

    def _with_gradient(self, row: TensorRow, tensor: Tensor) -> tuple[TensorRow, ...]:
        """Return the rows of a tensor that has joined the backward pass since it was recorded."""
        if tensor.grad_fn is None:
            if is_readable(tensor):
                self._show(row, tensor)
        elif row.is_constant:
            # An autograd function returned a tensor that it computed without gradients.
            row = self._unseen_row(tensor, row.module, (row,))
        return (row,)

    def _unseen_row(self, tensor: Tensor, path: str, inputs: tuple[TensorRow, ...]) -> TensorRow:
        """Return the row of a result of an autograd function, a scripted module or an extension."""
        # It is made when the tensor is first read, under the reader's module if no other is known.
        word = type(tensor.grad_fn).__name__.partition("Backward")[0]
        row = self._row(self._unique(full_name(path, word)), path, inputs)
        if is_readable(tensor):
            self._show(row, tensor)
        return row

    def _hand_back(self, tensor: Tensor, name: str, running: RunningFunction) -> None:
        """Record a result that is one of the arguments, unchanged."""

    def _is_made(self, tensor: Tensor) -> bool:
        """Check whether a result is a new tensor, and not an updated parameter or buffer."""
        rows = self._rows(tensor)
        return not rows or tensor.grad_fn is not None or not any(row.is_given for row in rows)

    def _note(self, tensor: Tensor, name: str, running: RunningFunction) -> None:
        """Make the row of a result."""
        word, caller, inputs = running.word, running.caller, running.inputs
        is_dummy = not (inputs or tensor.numel() or tensor.grad_fn)  # of torch 2.11's checkpoints
        if word in ALIASES or is_dummy or not is_readable(tensor):
            self._rows_of[tensor] = inputs
            return
        row = self._row(name, caller.path, inputs)
        self._rows_of[tensor] = (row,)
        matmul = running.matmul_of(tensor)
        row.is_matmul = word in MATMUL_WORDS or matmul is not None
        if matmul is not None:
            gamma = matmul.log2_gamma
            row.log2_gamma, row.has_gradient_unit = gamma or 0, gamma is not None
        if self._counts_blocks and (axes := running.axes if matmul is None else matmul.axes):
            row.gradient_axis = gradient_axis(axes[0], tensor)
        for checkpoint in caller.checkpoints:
            self.checkpoints[checkpoint].append((row, word))
        if takes_part(tensor):
            self._show(row, tensor)
        elif not caller.checkpoints:
            row.is_constant = True
        elif self._select(row.name, row.module):
            # Its part in the backward pass is known only when it is recomputed.
            self._measuring.value(row, tensor)

    def _note_again(
        self, results: Sequence[Tensor], word: str, arguments: Sequence[Tensor], caller: Caller
    ) -> None:
        """Give the recomputed results of a checkpoint the rows of the first computation."""
        if word in ALIASES:
            return
        with plain_functions():
            unchanged = {
                id(tensor) for tensor in arguments if word[0] != "i" and tensor.grad_fn is None
            }
            for tensor in results:
                if id(tensor) in unchanged or not is_readable(tensor):
                    continue
                rows = self.checkpoints.get(caller.again)
                if not rows or rows[0][1] != word:
                    continue  # it did not exist before
                row, _ = rows.popleft()
                for checkpoint in caller.checkpoints:
                    self.checkpoints[checkpoint].append((row, word))
                if takes_part(tensor) and row.forward is not None:
                    row.is_shown = True
                    self.gradients.measure(row, tensor)

    def _row(
        self, name: str, module: str, inputs: tuple[TensorRow, ...], *, is_given: bool = False
    ) -> TensorRow:
        """Make the row of a tensor that the step starts from or computes."""
        row = TensorRow(name, module, inputs, is_given=is_given)
        (self.given if is_given else self.made).append(row)
        row.log2_sigma = self._units.get(name, 0)
        return row

    def _show(self, row: TensorRow, tensor: Tensor, *, with_gradient: bool = True) -> None:
        """Measure a readable tensor, and its gradient if one can arrive, unless it is left out."""
        if self._select(row.name, row.module):
            row.is_shown = True
            if row.forward is None:
                self._measuring.value(row, tensor)
            if with_gradient and takes_part(tensor) and not row.is_hooked:
                self.gradients.measure(row, tensor)

    def _set_unit(self, tensor: Tensor, unit: Log2Unit, operand: Tensor, axis: int) -> None:
        """Record the unit in which a matmul has just read a tensor. The first known one counts."""
        # The matmul has read it as an operand, and summed over a dimension of the operand.
        row = self._only_row(tensor)
        if row is None:
            return
        row.is_operand = True
        self._measure_blocks(row, operand, axis, unit)
        if row.has_unit:
            return
        row.has_unit, row.log2_sigma = unit is not None, unit or 0
        self._count_again(row, tensor)

    def _measure_blocks(
        self, row: TensorRow | None, operand: Tensor, axis: int, unit: Log2Unit
    ) -> None:
        if row is not None and (row.is_shown or row.forward is not None):
            self._measuring.operand(row, operand, axis, unit)

    def _count_again(self, row: TensorRow, tensor: Tensor) -> None:
        """Recount formats if the unit differs from that of the last sample."""
        is_counted = self._measuring.counts_stored and row.forward is not None
        if is_counted and row.log2_counted != row.log2_sigma:
            self._measuring.value(row, tensor)

    def _mark_operands(self, operands: Sequence[Tensor], word: str) -> None:
        """Record that a matmul reads tensors. An attention names its own operands."""
        roles = ATTENTION_ROLES if word == ATTENTION else ("",) * len(operands)
        for tensor, role in zip(operands, roles, strict=False):
            row = self._only_row(tensor)
            if row is None:
                continue
            row.is_operand = True
            if role and row.name.removeprefix(f"{row.module}.").startswith("getitem"):
                row.name = self._unique(full_name(row.module, role))
                row.is_shown = row.is_shown and self._select(row.name, row.module)
                if is_readable(tensor):
                    self._show(row, tensor)

    def _unique(self, base: str) -> str:
        return unique_name(base, self._seen)


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists, tuples and dictionaries among them."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors_in(value)
        elif isinstance(value, dict):
            tensors += _tensors_in(value.values())
    return tensors
