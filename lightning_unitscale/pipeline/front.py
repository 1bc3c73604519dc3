"""``pipeline()``: from a module to its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint

from lightning_unitscale.pipeline.build import build_stages
from lightning_unitscale.pipeline.flow import MultiUseParameterConfig
from lightning_unitscale.pipeline.loss import LossSpec
from lightning_unitscale.pipeline.marks import is_mark, marked
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.policy import LOSS
from lightning_unitscale.pipeline.program import Program, capture_program

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]
MultiUse = MultiUseParameterConfig | Mapping[str, MultiUseParameterConfig]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...] | Tensor = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    loss_spec: LossSpec = None,
    multi_use_param_spec: MultiUse = MultiUseParameterConfig.REPLICATE,
) -> Pipe:
    """Cut a module into stages that run one after the other.

    The module's ``forward`` is captured for one microbatch, with nothing computed, and cut at the
    calls of ``pipe_split()`` in its code, at the edges in ``split_spec``, or where ``split_policy``
    says. The module itself stays as it is, and the stages have its own parameters.

    Args:
        module: The module, in the mode (training or not) in which it shall run.
        mb_args: Example arguments for one microbatch.
        mb_kwargs: Example keyword arguments for one microbatch.
        split_spec: Paths of submodules to the edge that is a cut.
        split_policy: Takes the captured graph and puts cuts into it, such as
            ``balanced_split(4)``.
        loss_spec: Which output is the loss: its key, or the structure of the output with ``True``
            there. By default the key ``"loss"``, or an output that is one scalar.
        multi_use_param_spec: What becomes of parameters that several stages use; by name for some
            of them, the others are replicated.

    Raises:
        ValueError: If an argument is wrong, no cut is given, or a stage would be empty.
        RuntimeError: If ``forward`` cannot be captured as one graph.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> pipe = pipeline(model, torch.ones(3, 4), split_spec={"2": SplitPoint.BEGINNING})
        >>> pipe.num_stages
        2
    """
    if split_spec and split_policy is not None:
        raise ValueError(
            f"split_spec={dict(split_spec)!r} and split_policy={split_policy!r}: both say where to "
            "cut; expected one of them; leave one out."
        )
    args = (mb_args,) if isinstance(mb_args, Tensor) else mb_args
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"mb_args={mb_args!r}: expected a tuple of the arguments of one microbatch; pass "
            "(x,) for one argument."
        )
    if mb_kwargs is not None and not isinstance(mb_kwargs, Mapping):
        raise TypeError(
            f"mb_kwargs={type(mb_kwargs).__name__}: expected a dict of keyword arguments; pass "
            "several positional arguments as one tuple."
        )
    multi_use = _multi_use(module, multi_use_param_spec)
    with marked(module, split_spec):
        program = capture_program(module, tuple(args), dict(mb_kwargs or {}), loss_spec=loss_spec)
    _check_marks(module, program, split_spec)
    cut_by(program, split_policy, required=split_policy is None)
    return build_pipe(program, module, multi_use)


def cut_by(program: Program, policy: SplitPolicy | None, *, required: bool) -> bool:
    """Put a policy's cuts into the graph; returns whether there were marks before.

    A policy finds the position of the loss among the graph's outputs in ``meta["loss"]`` of the
    graph module: the backward pass starts there and nowhere else. One with ``num_stages=1`` may
    leave the graph whole.

    Raises:
        ValueError: If there is no cut and one is required, or both marks and a policy.
    """
    graph = program.graph_module.graph
    has_marks = any(map(is_mark, graph.nodes))
    program.graph_module.meta[LOSS] = program.loss
    if policy is not None:
        if has_marks:
            raise ValueError(
                f"split_policy={policy!r}: the model's code calls pipe_split() as well; expected "
                "one of them to say where to cut; leave one out."
            )
        policy(program.graph_module)
        if getattr(policy, "num_stages", None) != 1 and not any(map(is_mark, graph.nodes)):
            raise ValueError(
                f"split_policy={policy!r}: it put no cut into the graph; expected a call of "
                "pipe_split() in front of every stage but the first; insert them with "
                "graph.call_function(pipe_split), or pass balanced_split(1) for one stage."
            )
    elif required and not has_marks:
        raise ValueError(
            "split_spec=None, split_policy=None: nothing says where to cut, and the model's code "
            "does not call pipe_split(); expected at least one cut; pass for example "
            "split_policy=balanced_split(2)."
        )
    return has_marks


def build_pipe(
    program: Program, module: nn.Module, multi_use: Callable[[str], MultiUseParameterConfig]
) -> Pipe:
    """Cut a captured program at its marks."""
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    kept = module.state_dict(keep_vars=True)
    stages = build_stages(program, multi_use, frozenset(buffers & kept.keys()))
    known = {
        id(one): name for stage in stages for name, one in stage.state_dict(keep_vars=True).items()
    }
    aliases = {
        name: known[id(one)]
        for name, one in kept.items()
        if id(one) in known and known[id(one)] != name
    }
    return Pipe(program, stages, aliases)


def _check_marks(
    module: nn.Module, program: Program, spec: Mapping[str, SplitPoint] | None
) -> None:
    if not spec:
        return
    found = sum(map(is_mark, program.graph_module.graph.nodes))
    if found < len(spec):
        raise ValueError(
            f"split_spec={dict(spec)!r}: {found} of these {len(spec)} cuts are in what "
            f"{type(module).__name__}.forward runs; expected modules that it calls outside of "
            "checkpoints; name others."
        )


def _multi_use(module: nn.Module, spec: MultiUse) -> Callable[[str], MultiUseParameterConfig]:
    if isinstance(spec, MultiUseParameterConfig):
        return lambda name: spec
    if not isinstance(spec, Mapping):
        raise TypeError(
            f"multi_use_param_spec={spec!r}: expected a MultiUseParameterConfig, or a dict from "
            "names of parameters to it."
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    by_tensor: dict[int, MultiUseParameterConfig] = {}
    for name, config in spec.items():
        if name not in parameters:
            raise ValueError(
                f"multi_use_param_spec[{name!r}]: {type(module).__name__} has no such parameter; "
                "expected names of named_parameters(); correct the name."
            )
        if not isinstance(config, MultiUseParameterConfig):
            raise TypeError(
                f"multi_use_param_spec[{name!r}]={config!r}: expected a MultiUseParameterConfig."
            )
        by_tensor[id(parameters[name])] = config

    def of(name: str) -> MultiUseParameterConfig:
        # A tied parameter has several names, and the graph knows it by one of them.
        return by_tensor.get(id(parameters.get(name)), MultiUseParameterConfig.REPLICATE)

    return of
