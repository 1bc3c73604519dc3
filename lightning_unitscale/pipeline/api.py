"""``pipeline()``: from a module, or an ``nn.Sequential``, to its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from typing_extensions import override

from lightning_unitscale.pipeline.balance import LOSS
from lightning_unitscale.pipeline.build import build_stages
from lightning_unitscale.pipeline.capture import capture_program
from lightning_unitscale.pipeline.cuts import is_mark, marked
from lightning_unitscale.pipeline.dataflow import MultiUseParameterConfig
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.program import LossSpec, Program

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
        module: The module, in the mode (training or not) in which it is to run.
        mb_args: Example arguments for one microbatch.
        mb_kwargs: Example keyword arguments for one microbatch.
        split_spec: Paths of submodules to the edge that is a cut.
        split_policy: Takes the captured graph and puts cuts into it, such as
            ``balanced_split(4)``.
        loss_spec: Which output is the loss: its key, or the structure of the output with ``True``
            there. By default the key ``"loss"``, or an output that is one scalar.
        multi_use_param_spec: How several stages use one parameter: for all, or by name for some;
            the others are replicated.

    Raises:
        ValueError: If an argument is wrong, no cut is given, or a stage would be empty.
        RuntimeError: If ``forward`` cannot be captured as one graph.

    Examples:
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
    if split_policy is not None or not has_marks(program):
        cut_by(program, split_policy)
    return build_pipe(program, module, multi_use)


def has_marks(program: Program) -> bool:
    """Whether a program has marks to cut at."""
    return any(map(is_mark, program.graph_module.graph.nodes))


def cut_by(program: Program, policy: SplitPolicy | None) -> None:
    """Put a policy's cuts into the graph of a program without marks.

    Args:
        program: The graph.
        policy: Finds the position of the loss among the graph's outputs in ``meta["loss"]`` of the
            graph module: the backward pass starts there and nowhere else. With ``num_stages=1`` it
            may leave the graph uncut.

    Raises:
        ValueError: If the policy cuts nowhere, there is none, or there are marks as well.
    """
    if policy is None:
        raise ValueError(
            "split_spec=None, split_policy=None: nothing says where to cut, and the model's code "
            "does not call pipe_split(); expected at least one cut; pass for example "
            "split_policy=balanced_split(2)."
        )
    if has_marks(program):
        raise ValueError(
            f"split_policy={policy!r}: the model's code calls pipe_split() as well; expected "
            "one of them to say where to cut; leave one out."
        )
    program.graph_module.meta[LOSS] = program.loss
    policy(program.graph_module)
    if getattr(policy, "num_stages", None) != 1 and not has_marks(program):
        raise ValueError(
            f"split_policy={policy!r}: it put no cut into the graph; expected a call of "
            "pipe_split() in front of every stage but the first; insert them with "
            "graph.call_function(pipe_split), or pass balanced_split(1) for one stage."
        )


def replicate(name: str) -> MultiUseParameterConfig:
    """Every stage that uses a parameter has it."""
    return MultiUseParameterConfig.REPLICATE


def build_pipe(
    program: Program,
    module: nn.Module,
    multi_use: Callable[[str], MultiUseParameterConfig] = replicate,
) -> Pipe:
    """Cut a captured program at its marks.

    Args:
        program: The program.
        module: The module that it was captured from.
        multi_use: How several stages use a parameter, by its name.
    """
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    state = module.state_dict(keep_vars=True)
    stages = build_stages(program, multi_use, frozenset(buffers & state.keys()))
    names = {
        id(tensor): name
        for stage in stages
        for name, tensor in stage.state_dict(keep_vars=True).items()
    }
    aliases = {
        name: names[id(tensor)]
        for name, tensor in state.items()
        if id(tensor) in names and names[id(tensor)] != name
    }
    return Pipe(program, stages, aliases)


def _check_marks(
    module: nn.Module, program: Program, spec: Mapping[str, SplitPoint] | None
) -> None:
    if not spec:
        return
    num_marks = sum(map(is_mark, program.graph_module.graph.nodes))
    if num_marks < len(spec):
        raise ValueError(
            f"split_spec={dict(spec)!r}: {num_marks} of these {len(spec)} cuts are in what "
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


class PipeSequential(nn.Sequential):
    """``nn.Sequential`` whose every module is a stage of its own."""

    @staticmethod
    def from_sequential(sequential: nn.Sequential) -> PipeSequential:
        """The same modules under the same names, with a cut between each two.

        A module that occurs several times is several stages, with the same parameters.

        Raises:
            TypeError: If it is no ``nn.Sequential``, or one with a ``forward`` of its own.
        """
        if not isinstance(sequential, nn.Sequential):
            raise TypeError(
                f"sequential={type(sequential).__name__}: expected an nn.Sequential; mark the cuts "
                "of another module with split_spec."
            )
        if type(sequential).forward not in (nn.Sequential.forward, PipeSequential.forward):
            raise TypeError(
                f"sequential={type(sequential).__name__}: expected the forward of nn.Sequential, "
                "and it has its own, which would be lost; mark the cuts with split_spec."
            )
        stages = PipeSequential()
        # named_children() leaves out a module that occurs a second time.
        for path, module in sequential.named_modules(remove_duplicate=False):
            if path and "." not in path:
                stages.add_module(path, module)
        stages.training = sequential.training
        return stages

    @override
    def forward(self, input: Any) -> Any:
        """Runs the modules in order."""
        for index, module in enumerate(self):
            if index:
                pipe_split()
            input = module(input)
        return input
