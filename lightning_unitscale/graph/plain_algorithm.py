"""Have traced code take the algorithm that it takes when nobody traces it.

Some models look whether they are being compiled and then compute the same thing in another order: a
parallel scan instead of a loop. The result has other last bits, so a captured step would no longer
be the plain one. A function that was seen to do so is traced again and told that nobody compiles.

Torch 2.11 says of whatever it traces that it is exported, for which Hugging Face's models give
attention an explicit mask; from 2.12 on, and here, only an export is one.

Private names used here were checked on torch 2.13 and 2.11: ``tracing_state_functions``, the
restart exceptions of ``torch._dynamo.exc``, ``tx`` in the handler that answers the question, and
``_is_exporting_flag``.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import exc
from torch._dynamo.variables import torch as torch_variables

from lightning_unitscale.shadowing import shadowed

# Code of functions, as (file, function), that asked while they were traced whether they are being
# compiled; and of those among them that then took an algorithm which is not the plain step's.
_asked: set[tuple[str, str]] = set()
_told_no: set[tuple[str, str]] = set()
_IS_COMPILING = frozenset({torch.compiler.is_compiling})
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.*)_at_\d+$")
_FRAME = re.compile(r'File "([^"]+)", line \d+, in (\S+)')
_TORCH = torch.__path__[0]


@contextlib.contextmanager
def plain_answers() -> Iterator[None]:
    """Within this context Dynamo answers functions that were seen to switch algorithms with no."""
    usual = torch_variables.tracing_state_functions
    # Dynamo looks this function up whenever traced code asks.
    with shadowed(torch_variables, tracing_state_functions=lambda: _Answers(usual())):
        yield


class _Answers(dict[Any, Any]):
    """What Dynamo tells traced code about the state of tracing, and to whom it did."""

    def __getitem__(self, function: Any) -> Any:
        if function is torch.compiler.is_exporting:
            return torch.compiler._is_exporting_flag
        answer = super().__getitem__(function)
        if function not in _IS_COMPILING:
            return answer
        callers = _traced_callers(sys._getframe(1))
        if callers and callers[0][0].startswith(_TORCH):
            # torch's own code (its checkpointing) knows what it needs to be told.
            return answer
        # The question is often asked through a helper or two.
        _asked.update(callers[:3])
        return answer and not any(one in _told_no for one in callers)


def _traced_callers(frame: Any) -> list[tuple[str, str]]:
    """Functions that Dynamo is inlining, innermost first; ``frame`` is in Dynamo's handler."""
    translator = frame.f_locals.get("tx")
    callers = []
    while translator is not None:
        code = translator.f_code
        callers.append((code.co_filename, _RESUMED.sub(r"\1", code.co_name)))
        translator = getattr(translator, "parent", None)
    return callers


class _TraceAgain(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
    """Dynamo's way to trace a frame anew. Nothing of the frame has run by then.

    A backend may raise the first class; the second makes Dynamo forget the course of its last try.
    """


def refuse_other_algorithms(graph_module: fx.GraphModule) -> None:
    """Have Dynamo trace the frame again where code took an algorithm for compilers only.

    The sign is a higher-order operator or a ``vmap`` (torch's parallel scan comes as either) over
    tensors with a gradient, made by a function that had asked whether it is being compiled.
    """
    found = set()
    for node in graph_module.graph.nodes:
        is_higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
        is_vmap = getattr(node.target, "__name__", "") == "_add_batch_dim"
        is_checkpoint = node.target is torch.ops.higher_order.tag_activation_checkpoint
        if is_checkpoint or not (is_higher_order or is_vmap):
            continue
        read = [one.meta.get("example_value") for one in node.all_input_nodes]
        if any(isinstance(one, Tensor) and one.requires_grad for one in read):
            frames = _FRAME.findall(node.meta.get("stack_trace") or "")
            users = [one for one in frames if not one[0].startswith(_TORCH)]
            if users and users[-1] in _asked:
                found.add(users[-1])
    if found - _told_no:
        _told_no.update(found)
        raise _TraceAgain(restart_reason="another algorithm under a compiler")
