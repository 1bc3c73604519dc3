"""Record one call of a step as a graph: every tensor, and the call that computed it."""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.overrides import handle_torch_function
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.capture.graph_recorder import stored_elements
from lightning_unitscale.capture.name_patterns import own_path
from lightning_unitscale.functional.scale import plain_tensor
from lightning_unitscale.monitor.input_gradients import GradientPath, InputGradients
from lightning_unitscale.monitor.names import ALIASES, Caller, full_name, tensors_of
from lightning_unitscale.monitor.rows import Measuring, RunningFunction, TensorRow
from lightning_unitscale.monitor.torch_state import is_readable, plain_functions, unseen
from lightning_unitscale.monitor.watched_call import WatchedCall
from lightning_unitscale.scales.layout import MOMENTS
from lightning_unitscale.scales.torch_rows import functional_row


class ExactMoments(Measuring):
    """The exact moments of tensors, and of gradients in the last backward pass."""

    def __init__(self) -> None:
        super().__init__(MOMENTS)
        self.counts_stored = False

    @override
    def of(self, tensor: Tensor, log2_unit: int) -> Any:
        with unseen(), torch.inference_mode():
            return functional_row(stored_elements(tensor), MOMENTS)

    @override
    def gradient(self, row: TensorRow, gradient: Tensor) -> None:
        row.backward = [self.of(gradient, 0)]


# By the name of a parameter or buffer: "parameters" or "buffers", and whether it is trained.
State: TypeAlias = dict[str, tuple[str, bool]]


def state_of(module: nn.Module) -> State:
    """Return the state of a module."""
    state: State = {own_path(name): ("buffers", False) for name, _ in module.named_buffers()}
    for name, parameter in module.named_parameters():
        state[own_path(name)] = "parameters", parameter.requires_grad
    return state


@dataclass(frozen=True)
class InUnits:
    """A matmul that ran on scaled operands."""

    # By their names in the gauge.
    operands: dict[str, TensorRow]
    log2_units: tuple[int, ...]
    log2_gamma: int


@dataclass(frozen=True)
class Made:
    """The call that computed a tensor, as in an FX node, with rows in place of tensors."""

    op: str  # "call_function" or "call_method"
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    variables: tuple[str, ...] = ()  # the variables that the caller assigns the results to
    # Name of the call, if it returns several tensors, and which of them this is.
    name: str = ""
    index: int | None = None


# The instruction with which a caller calls a function, and the variables that get its results.
_Use: TypeAlias = tuple[str, tuple[str, ...]]


class TrackedCall(WatchedCall):
    """A call of a step, with a row for every tensor that it computes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inputs = InputGradients(self.gradients.leaf_node)
        self.how_made: dict[TensorRow, Made] = {}
        self.in_units: dict[TensorRow, InUnits] = {}
        self.outputs: list[TensorRow] = []
        # For an argument that a function returns unchanged: the row of that argument.
        self.same_as: dict[TensorRow, TensorRow] = {}
        self.state: State = {}
        self._paths: dict[TensorRow, GradientPath] = {}

    def rows_of(self, row: TensorRow) -> tuple[Any, Any]:
        """Return the statistics of a tensor and of its gradient; ``None`` if there are none."""
        row = self.same_as.get(row, row)
        path = self._paths.get(row)
        is_known = bool(row.backward) and not (path is not None and path.is_lost)
        return row.forward, row.backward[-1] if is_known else None

    @override
    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        word: str,
        caller: Caller,
    ) -> Any:
        if caller.again is not None:
            return super().run(function, args, kwargs, word, caller)
        arguments = tensors_in((args, kwargs))
        with plain_functions():
            # In Dynamo's order: a module reads its parameters before its arguments.
            self._inputs([one for one in arguments if isinstance(one, nn.Parameter)], word)
            self._inputs(arguments, word)
            self._begin_paths(arguments)
            use = _use_of(function, sys._getframe(1).f_back, self.callers.top)
            rows = [tree_map(self._constant, each) for each in (args, kwargs)]
            made = _how_made(function, word, rows[0], rows[1], use)
            beside = self.inputs.run_beside(function, args, kwargs)
        known = len(self.made)
        result = super().run(function, args, kwargs, word, caller)
        results = tensors_in(result)
        with plain_functions():
            if word == "setitem":
                results = [arguments[0]]
                name = self._unique(full_name(caller.path, word))
                running = RunningFunction(word, caller, self._inputs(arguments, word))
                self._note(arguments[0], name, running)
            if beside is not None:
                self.inputs.follow(beside, arguments, tensors_in(result))
            new = set(self.made[known:]) - self.how_made.keys()
            for index, tensor in enumerate(results):
                row = self._only_row(tensor)
                if row in new:
                    several = not isinstance(result, Tensor) and result is not None
                    call = replace(made, name=word, index=index) if several else made
                    self.how_made[row] = call
                if row is not None and (path := self.inputs.path_of(tensor)) is not None:
                    self._follow(row, path)
        return result

    @override
    def close(self) -> None:
        super().close()
        self.inputs.close()

    @override
    def pass_by(self, arguments: Sequence[Any]) -> None:
        with plain_functions():
            self.inputs.lose(map(plain_tensor, tensors_in(arguments)))

    @override
    def see_compiled(self, frame: FrameType, nodes: range) -> None:
        scope = frame.f_locals
        self.pass_by((scope.get("args", ()), scope.get("kwargs", {})))
        super().see_compiled(frame, nodes)

    @override
    def finish(self, module: nn.Module, output: Any) -> None:
        returned = [tensor for _, tensor in tensors_of(output)]
        super().finish(module, returned)
        self.state = state_of(module)
        with plain_functions():
            self._begin_paths(returned)
            self.outputs = [row for one in returned if (row := self._only_row(one)) is not None]
            kept = {id(buffer) for buffer in module.buffers()}
            for tensor in returned:
                if id(tensor) not in kept:
                    self._attach(tensor)

    @override
    def _note(self, tensor: Tensor, name: str, running: RunningFunction) -> None:
        found = [(each, self._only_row(one), unit) for one, unit, each in running.units]
        row = self._row(name, running.caller.path, running.inputs)
        self._rows_of[tensor] = (row,)
        matmul = running.matmul_of(tensor)
        if matmul is not None:
            operands = {each: one for each, one, unit in found if one and unit is not None}
            if len(operands) == len(found) == 2:
                units = tuple(unit for _, _, unit in found if unit is not None)
                self.in_units[row] = InUnits(operands, units, matmul.log2_gamma or 0)
        if is_readable(tensor):
            for checkpoint in running.caller.checkpoints if running.word not in ALIASES else ():
                self.checkpoints[checkpoint].append((row, running.word))
            self._show(row, tensor)

    @override
    def _hand_back(self, tensor: Tensor, name: str, running: RunningFunction) -> None:
        source = self._only_row(tensor)
        if source is None:
            return
        row = self._row(name, running.caller.path, running.inputs)
        row.is_hooked = True
        self.same_as[row] = self.same_as.get(source, source)
        self._rows_of[tensor] = (row,)

    @override
    def _is_made(self, tensor: Tensor) -> bool:
        return True

    @override
    def _new_rows(self, tensor: Tensor) -> tuple[TensorRow, ...]:
        rows = super()._new_rows(tensor)
        if rows:
            return rows
        named = self._start_names.find(tensor) or (self._unique("constant"), "")
        row = self._row(*named, (), is_given=True)
        if is_readable(tensor):
            self._show(row, tensor)
        return (row,)

    def _begin_paths(self, tensors: Sequence[Tensor]) -> None:
        """Begin the paths of inputs, and end those of tensors that now require a gradient."""
        for tensor in tensors:
            row = self._only_row(tensor)
            if row is None:
                continue
            if tensor.requires_grad:
                self.inputs.rejoin(tensor)
            elif (
                row.is_given
                and row.name.startswith("input.")
                and row not in self._paths
                and torch.is_grad_enabled()
                and is_readable(tensor)
            ):
                self._follow(row, self.inputs.start(tensor))

    def _follow(self, row: TensorRow, path: GradientPath) -> None:
        if not row.is_hooked:
            self._paths[row] = path
            self.gradients.measure(row, path.tensor)

    def _attach(self, tensor: Tensor) -> None:
        """Let the caller's backward pass reach a result that does not require a gradient itself."""
        base = tensor if tensor._base is None else tensor._base
        origin = self._only_row(base)
        path = self.inputs.path_of(tensor)
        if path is None or origin is None or self.same_as.get(origin, origin).is_given:
            return
        with unseen(), torch.enable_grad():
            leaf = torch.zeros((), requires_grad=True, device=tensor.device)
            _Attach.apply(tensor, leaf, functools.partial(self.inputs.arrive, path.tensor))

    def _constant(self, value: Any) -> Any:
        """Return the row of a tensor, or a constant that a graph may have."""
        if isinstance(value, Tensor):
            return self._only_row(value)
        if isinstance(value, slice):
            return slice(*map(self._constant, (value.start, value.stop, value.step)))
        return value if isinstance(value, fx.node.base_types) else None


class _Attach(torch.autograd.Function):
    """Makes the tensor ``result`` itself take part in the backward pass."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, leaf: Tensor, arrive: Callable[[Tensor], None]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.arrive = arrive
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[None, None, None]:
        if grad_output is not None and not torch.is_grad_enabled():
            ctx.arrive(grad_output)
        return None, None, None


def _how_made(
    function: Any, word: str, args: tuple[Any, ...], kwargs: dict[str, Any], use: _Use
) -> Made:
    """Describe a call of a torch function, with the operators and methods that the caller wrote."""
    instruction, variables = use
    name = getattr(function, "__name__", word)
    if name == "__get__":
        return Made("call_function", getattr, (*args[:1], word), {}, variables)
    if getattr(Tensor, name, None) is not function:
        return Made("call_function", function, args, kwargs, variables)
    if name[:2] == "__" or not instruction.startswith("CALL"):
        target = getattr(operator, word, None) or getattr(operator, f"{word}_", None)
        if target is not None:
            args = args[::-1] if name.startswith("__r") and len(args) == 2 else args
            return Made("call_function", target, args, kwargs, variables)
    return Made("call_method", name, args, kwargs, variables)


def _use_of(function: Any, frame: FrameType | None, top: CodeType) -> _Use:
    """Find out what a caller, below the code that calls the step, does with a torch function."""
    # As in Dynamo's graphs, the first variables count, also those of a caller that the results are
    # returned to.
    own, first = getattr(function, "__code__", None), ""
    while frame is not None and frame.f_code is not top:
        code = frame.f_code
        if code is not own and code is not handle_torch_function.__code__:
            instruction, following, variables = _instructions(code).get(frame.f_lasti, ("", "", ()))
            first = first or instruction
            if following != "RETURN_VALUE":
                return first, variables
        frame = frame.f_back
    return first, ()


@functools.lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> dict[int, tuple[str, str, tuple[str, ...]]]:
    """Map each offset to its instruction, the next one, and the variables that are assigned."""
    every = list(dis.get_instructions(code))
    # Python 3.11 may run a call together with its PRECALL.
    kept = [one for one in every if one.opname != "PRECALL"]
    found = {}
    for index, (one, after) in enumerate(pairwise(kept)):
        count = (after.arg or 0) if after.opname == "UNPACK_SEQUENCE" else 0
        stores = kept[index + 2 : index + 2 + count] if count else [after]
        names = [name for store in stores for name in _stored_by(store)]
        found[one.offset] = one.opname, after.opname, tuple(names[: max(count, 1)])
    for one, after in pairwise(every):
        entry = found[after.offset if one.opname == "PRECALL" else one.offset]
        # During a call, the offset of the caller's frame is in the cache after the instruction.
        found.update(dict.fromkeys(range(one.offset, after.offset, 2), entry))
    return found


def _stored_by(instruction: dis.Instruction) -> tuple[str, ...]:
    if not instruction.opname.startswith("STORE_") or instruction.argval is None:
        return ()
    value = instruction.argval
    return value if isinstance(value, tuple) else (str(value),)
