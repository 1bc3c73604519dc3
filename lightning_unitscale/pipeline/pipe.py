"""Cut a module into stages with ``pipeline()``, and run them in one process as a reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint
from typing_extensions import override

from lightning_unitscale.arguments import check_callable, check_instance
from lightning_unitscale.pipeline.captured_program import capture_program
from lightning_unitscale.pipeline.cuts import SplitPolicy, cut_by, marked, num_marks
from lightning_unitscale.pipeline.program import LossSpec, Program, split_batch
from lightning_unitscale.pipeline.stage import StageInfo, StageModule, build_stages
from lightning_unitscale.pipeline.torch_engine import EngineStage
from lightning_unitscale.pipeline.whole_batch import BatchLoss, batch_loss_of


@dataclass(frozen=True)
class PipeInfo:
    """Inputs, parameters and outputs of the stages of a pipeline.

    Attributes:
        num_stages: Number of stages.
        stages: Descriptions of the stages.
        has_loss: Whether one of the outputs is known to be the loss.
        shared_parameters: Parameters that several stages use, with these stages.
        left_out: Outputs of the module that the pipeline does not return.
    """

    num_stages: int
    stages: tuple[StageInfo, ...]
    has_loss: bool
    shared_parameters: dict[str, tuple[int, ...]]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        rows = [
            (
                info.index,
                info.num_operations,
                len(info.parameters),
                ", ".join(info.input_names),
                "\n".join(f"{sent.name} {sent.tensor}" for sent in info.sent),
                info.sent_bytes,
                len(info.recomputed),
            )
            for info in self.stages
        ]
        headers = ("stage", "operations", "parameters", "arguments", "sends", "bytes", "recomputed")
        lines = [tabulate(rows, headers=headers)]
        lines += [
            f"{name} is in stages {', '.join(map(str, stages))}"
            for name, stages in self.shared_parameters.items()
        ]
        return "\n".join(lines)


class Pipe(nn.Module):
    """The stages of a module in order.

    A call runs all stages in this process, one after the other. The result and, by autograd, the
    gradients have the same bits as those of the module. The stages share the module's parameters,
    under the same names.

    Args:
        program: The captured module.
        stages: Its stages.
        aliases: Other names of tied parameters and buffers, and their names in the stages.

    Attributes:
        stages: The stages in order.
        batch_loss: How to compute the loss of a batch from the losses of its microbatches.
    """

    def __init__(
        self, program: Program, stages: list[StageModule], aliases: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self.batch_loss = BatchLoss()
        self.program = program
        self.stages = tuple(stages)
        self._aliases = dict(aliases or {})

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    def get_stage_module(self, stage_index: int) -> StageModule:
        """Return one stage.

        Raises:
            ValueError: If there is no such stage.
        """
        if not isinstance(stage_index, int) or not 0 <= stage_index < self.num_stages:
            raise ValueError(
                f"stage_index={stage_index!r}: the pipeline has {self.num_stages} stages. Expected "
                f"an index from 0 to {self.num_stages - 1}."
            )
        return self.stages[stage_index]

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> PipelineStage:
        """Return one stage for a schedule of ``torch.distributed.pipelining``.

        Pass the module's arguments to ``schedule.step`` by name on every rank. The result is the
        loss, if it is known. The engine cannot concatenate losses, so pass
        ``return_outputs=False``. Pass ``scale_grads=False`` to the schedule, and divide the loss by
        the number of microbatches. Losses are not weighted, and gradients of
        ``info().shared_parameters`` are not summed across ranks. :class:`PipelineRunner` does all
        of that.

        Args:
            stage_index: Index of the stage.
            device: Device of the stage, which is moved there.
            group: The pipeline's process group; all ranks by default.

        Raises:
            ValueError: If there is no such stage.
            RuntimeError: If there is no process group.
        """
        stage = self.get_stage_module(stage_index)
        if not dist.is_initialized():
            raise RuntimeError(
                "Pipe.build_stage: there is no process group. Call "
                "torch.distributed.init_process_group first, with one rank per device."
            )
        device = torch.device(device)
        stage.on_device(device)
        return EngineStage(stage, self._run_by_name, device, group, has_backward=True)

    def _run_by_name(self, stage: StageModule, *received: Tensor, **inputs: Any) -> Any:
        """Run a stage. The last stage returns the loss, if it is known."""
        info = stage.info
        names = info.input_names
        if len(received) != len(info.received) or any(name not in inputs for name in names):
            raise ValueError(
                f"stage {info.index} was given {len(received)} positional arguments and "
                f"{sorted(inputs)}. Expected the module's arguments by name on every rank, "
                f"{', '.join(names) or 'none'} of them here: schedule.step(name=value, ...)."
            )
        outputs = stage(*received, *(inputs[name] for name in names))
        if not info.is_last:
            return outputs
        if self.program.loss is not None:
            return outputs[self.program.loss]
        tensors = tuple(value for value in outputs if isinstance(value, Tensor))
        return tensors[0] if len(tensors) == 1 else tensors

    def info(self) -> PipeInfo:
        """Return the inputs, parameters and outputs of every stage."""
        stages = tuple(stage.info for stage in self.stages)
        return PipeInfo(
            num_stages=len(stages),
            stages=stages,
            has_loss=self.program.loss is not None,
            shared_parameters=self.shared_parameters(),
            left_out=self.program.left_out,
        )

    def shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters that several stages use, with the indices of these stages."""
        users: dict[str, list[int]] = {}
        for index, stage in enumerate(self.stages):
            for name in stage.info.parameters:
                users.setdefault(name, []).append(index)
        return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages, and return the result in the module's own structure.

        Raises:
            ValueError: If the arguments differ in structure or shape from the captured ones.
        """
        (flat,) = split_batch(self.program, args, kwargs, 1)
        values: tuple[Any, ...] = ()
        # An error within a captured no_grad must not change the caller's mode.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            for stage in self.stages:
                values = stage(*values, *(flat[position] for position in stage.info.inputs))
        return self.program.unflatten(list(values))

    @override
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all stages under the module's names, each once."""
        seen: set[str] = set()
        for stage in self.stages:
            for name, param in stage.named_parameters(prefix, recurse, remove_duplicate):
                if name not in seen or not remove_duplicate:
                    seen.add(name)
                    yield name, param

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return parameters and buffers of all stages, with tied ones under each of their names."""
        state: dict[str, Tensor] = {}
        for stage in self.stages:
            state |= stage.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for alias, name in self._aliases.items():
            if prefix + name in state:
                state[prefix + alias] = state[prefix + name]
        return state


def build_pipe(program: Program, module: nn.Module) -> Pipe:
    """Cut a captured program at its marks."""
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    state = module.state_dict(keep_vars=True)
    stages = build_stages(program, buffers & state.keys())
    states = [stage.state_dict(keep_vars=True) for stage in stages]
    names = {id(tensor): name for own in states for name, tensor in own.items()}
    aliases = {name: names[id(tensor)] for name, tensor in state.items() if id(tensor) in names}
    return Pipe(program, stages, aliases)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...] | Tensor = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    loss_spec: LossSpec = None,
) -> Pipe:
    """Cut a module into stages that run one after the other.

    The module's ``forward`` is captured for one microbatch, without computing anything. It is cut
    at calls of ``pipe_split()``, at the edges in ``split_spec``, or by ``split_policy``. The module
    itself does not change, and the stages share its parameters.

    Args:
        module: The module, in the mode (training or evaluation) in which it will run.
        mb_args: Example arguments for one microbatch.
        mb_kwargs: Example keyword arguments for one microbatch.
        split_spec: Mapping from paths of submodules to the edge to cut.
        split_policy: Function that inserts cuts into the captured graph, such as
            ``balanced_split(4)``.
        loss_spec: The output that is the loss: its key, or the structure of the output with
            ``True`` there. The default is the key ``"loss"``, or an output that is one scalar.

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
    if split_spec is not None:
        expected = "a dict of paths of submodules to a SplitPoint"
        advice = "pass for example split_spec={'layers.1': SplitPoint.BEGINNING}"
        check_instance("split_spec", split_spec, Mapping, expected, advice)
    if split_policy is not None:
        expected = "a function that puts cuts into a graph"
        check_callable("split_policy", split_policy, expected, "pass balanced_split(2)")
    if split_spec and split_policy is not None:
        raise ValueError(
            f"split_spec={dict(split_spec)!r} and split_policy={split_policy!r}: both set the "
            "cuts. Expected one of them. Leave one out."
        )
    args = (mb_args,) if isinstance(mb_args, Tensor) else mb_args
    expected = "a tuple of the arguments of one microbatch"
    check_instance("mb_args", args, (tuple, list), expected, "pass (x,) for one argument")
    if mb_kwargs is not None:
        advice = "pass several positional arguments as one tuple, mb_args"
        check_instance("mb_kwargs", mb_kwargs, Mapping, "a dict of keyword arguments", advice)
    with marked(module, split_spec):
        example = tuple(args), dict(mb_kwargs or {})
        program = capture_program(module, *example, loss_spec=loss_spec)
        batch_loss = batch_loss_of(module, program, *example, loss_spec)
    if split_spec and num_marks(program) < len(split_spec):
        raise ValueError(
            f"split_spec={dict(split_spec)!r}: only {num_marks(program)} of these "
            f"{len(split_spec)} cuts are in code that {type(module).__name__}.forward runs. "
            "Expected modules that it calls outside of checkpoints. Name others."
        )
    if split_policy is not None or not num_marks(program):
        cut_by(program, split_policy)
    pipe = build_pipe(program, module)
    pipe.batch_loss = batch_loss
    return pipe
