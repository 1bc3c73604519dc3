"""Unit-scale a LightningModule without changing what it computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.arguments import check_depth
from lightning_unitscale.callbacks import trainer_settings
from lightning_unitscale.callbacks.checkpoints import checking_checkpoints, keep_marking, mark
from lightning_unitscale.callbacks.distributed import refuse_distributed_tensors
from lightning_unitscale.callbacks.explanation import Explanation
from lightning_unitscale.callbacks.lightning_loop import LightningLoop
from lightning_unitscale.callbacks.lightning_steps import StepsCallback, captures_steps, enter
from lightning_unitscale.callbacks.matmul_units import MatmulUnits, RecalibrationSchedule, unmatched
from lightning_unitscale.callbacks.memory_budget import (
    budget_claim,
    compile_claims,
    step_partitioner,
)
from lightning_unitscale.callbacks.options import (
    FP8,
    LOSSLESS,
    Rules,
    Simulate,
    as_fp8,
    as_method,
    as_simulate,
    check_compile,
)
from lightning_unitscale.callbacks.packages import rank_zero_warn
from lightning_unitscale.callbacks.precision_reports import PrecisionReports
from lightning_unitscale.callbacks.rule_scaling import rules_of
from lightning_unitscale.capture.executors import CompileMode
from lightning_unitscale.capture.module_steps import ModuleSteps, breaks_list
from lightning_unitscale.capture.passes import GraphPass
from lightning_unitscale.loops.loop import Claim, Loop
from lightning_unitscale.matmuls.coverage import Coverage
from lightning_unitscale.matmuls.gauge import Gauge
from lightning_unitscale.matmuls.matmul_formats import MovingGrid
from lightning_unitscale.memory.budgets import check_budget
from lightning_unitscale.patching import nothing
from lightning_unitscale.precision.report import PrecisionReport

if TYPE_CHECKING:
    import lightning.pytorch as pl


class UnitScaleCallback(StepsCallback):
    """A callback that scales matmuls to RMS near 1, with the same losses and weights.

    Every matmul of the module's steps, forward and backward, runs on scaled operands. Their units
    are powers of two near their RMS, measured when the matmul first runs. Multiplying by a power of
    two is exact, so FP32 training stays bit-identical, and FP8 and FP16 matmuls read operands near
    RMS 1. Scaling happens at torch's dispatcher, below any Python code. Nothing is captured, and
    nothing runs twice. ``compile``, ``remat`` and pipelines run a captured graph, whose matmuls
    have the same units. The rule-based methods rewrite that graph. Parameters, optimizer,
    schedulers and checkpoints do not change.

    Args:
        method: ``"lossless"`` changes no result. ``"unit-scaling"`` and ``"u-mup"``, or
            :class:`Rules` with multipliers, scale by rules and change the model: weights at RMS 1,
            ``1 / sqrt(fan_in)`` in the graph, weighted residual branches (see
            ``transforms.unit_scale``). They differ in ``lr_scaling``.
        depth: Only ``"products"``, which scales matmuls.
        recalibrate: ``"auto"`` measures at steps 8, 16, 32, 64 and every 128th, and sets new units
            if the scaled RMS of an operand or gradient has left [1/4, 4]. A number sets new units
            at that interval of optimizer steps. ``None`` never does. New units change no result and
            cause no recompilation. With any setting, an operand that is zero at first gets a unit
            once it is not zero.
        replace: Rules only: mapping from functions to replacements, which Dynamo does not trace
            into.
        residual: Rules only: weights of residual branches with attention, and of the others. The
            default is u-muP's rule for depth.
        lr_scaling: Rules only: ``"match"`` keeps the relative update of every parameter.
            ``"u-mup"`` uses u-muP's rates, near 1 and the same for all widths and depths. ``None``
            leaves rates unchanged. The default depends on the method.
        init_weights: Rules only: whether to set weights to RMS 1 and biases to 0 on the first
            batch. The checkpoint records this, so it happens once.
        on_unknown: Rules only, if no rule gives a tensor's scale: ``"calibrate"`` measures it on
            the first batch, ``"keep"`` assumes 1, ``"error"`` raises.
        simulate: Format in which matmuls are simulated, in training and in evaluation: ``"fp8"``,
            one format such as ``"E3M2FN"``, a pair of them for operands and gradients, or
            :class:`Simulate` with a way of rounding. Operands are scaled before they are rounded. A
            matmul measures its units before it runs for the first time.
        precision: ``"fp8"``, or :class:`FP8` with exceptions, runs linear layers and their two
            gradients in real FP8 with constant scales. The numbers of features must be multiples of
            16 (or large enough to be padded). The operands must fit, at the first run and whenever
            units are measured again. It works with any precision of the Trainer, and results have
            the types of that precision. ``explain()`` shows the decision for each matmul. FP8 needs
            a GPU of compute capability 8.9, or a CPU, where it is slow.
        remat: Budget for rematerialization, as in :class:`RematCallback`.
        compile: Run the captured graphs with Inductor, in a mode of ``torch.compile`` such as
            ``"reduce-overhead"``, which has CUDA graphs, or ``"max-autotune"``. FP32 results are
            those of ``torch.compile`` up to its rounding, with the uncompiled step's random
            numbers.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: When a Trainer gets two of these callbacks, or a
            :class:`RematCallback` together with ``remat``. At ``setup``, if the device or the
            precision plugin does not support FP8, or if a module to be captured is compiled
            already. When you load a checkpoint that was trained by other rules, or by rules while
            the method is ``"lossless"``. Such a checkpoint does not load without this callback
            either.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_unitscale import ScaleMonitor, UnitScaleCallback
        >>> trainer = Trainer(callbacks=[UnitScaleCallback(), ScaleMonitor()])
    """

    def __init__(
        self,
        method: Literal["lossless", "unit-scaling", "u-mup"] | Rules = "lossless",
        *,
        depth: str = "products",
        recalibrate: Literal["auto"] | int | None = "auto",
        replace: dict[Callable[..., Any], Callable[..., Any]] | None = None,
        residual: tuple[float, float] | None = None,
        lr_scaling: Literal["match", "u-mup", "auto"] | None = "auto",
        init_weights: bool = True,
        on_unknown: Literal["calibrate", "keep", "error"] = "calibrate",
        simulate: str | tuple[str, str] | Simulate | None = None,
        precision: Literal["fp8"] | FP8 | None = None,
        remat: str | int | float | None = None,
        compile: bool | CompileMode = False,
    ) -> None:
        super().__init__()
        self._remember(locals())
        check_compile(compile)
        check_depth(depth)
        self.method = as_method(method)
        self.simulate = as_simulate(simulate)
        self.precision = as_fp8(precision)
        if self.precision is not None and self.simulate is not None:
            raise ValueError(
                f"precision={precision!r}: together with simulate, layers would run in one format "
                "and be simulated in another. Expected one of the two. Leave one out."
            )
        self.recalibrate = recalibrate
        self.remat = None if remat is None else check_budget(remat, name="remat")
        self.compile = compile
        self._rules = rules_of(
            self.method,
            replace=replace,
            residual=residual,
            lr_scaling=lr_scaling,
            init_weights=init_weights,
            on_unknown=on_unknown,
        )
        self._method_name = self.method.method if isinstance(self.method, Rules) else LOSSLESS
        self._fp8 = self._simulation = None
        if self.precision is not None:
            self._fp8 = self.precision.linears(is_lossless=self._rules is None)
        if self.simulate is not None:
            self._simulation = self.simulate.rounding_pass()
        schedule = RecalibrationSchedule(recalibrate)
        self._matmuls = MatmulUnits(schedule, self._simulation, self._fp8)
        self._reports = PrecisionReports(self.precision, self._fp8 or self._simulation)
        self._checkpoints = ExitStack()
        # The captured steps, and their lines in explain().
        self._steps: ModuleSteps | None = None
        self._what_was_captured = ""
        # True once the user's names have been searched for in the first training step.
        self._is_checked = False
        self._module: Callable[[], nn.Module | None] | None = None

    @property
    def gauge(self) -> Gauge:
        """Return the units in use; empty before the first batch."""
        return self._matmuls.gauge

    @property
    def coverage(self) -> Coverage:
        """Return the coverage of the matmuls of the last counted step.

        The first step, recalibrating steps, and steps in which matmuls left the format are counted.
        """
        return self._matmuls.counted.main

    @override
    def captures_steps(self, trainer: pl.Trainer) -> bool:
        """Check whether this needs the module's steps as captured graphs."""
        return any(self._captured_for().values())

    def _captured_for(self) -> dict[str, bool]:
        """Return the options that need captured steps, and whether they are set."""
        return {
            f"method={self.method!r}": self._rules is not None,
            f"compile={self.compile!r}": bool(self.compile),
            f"remat={self.remat!r}": self.remat is not None,
        }

    def explain(self) -> Explanation:
        """Explain which matmuls were scaled, and when units were measured."""
        self._note_captured()
        *parts, units = self._matmuls.explain().parts
        captured = self._what_was_captured
        parts += self._reports.lines
        if self._rules is not None:
            return Explanation(captured, *parts, units)
        return Explanation(*parts, captured, units)

    def precision_report(self, formats: Sequence[Any] | None = None) -> PrecisionReport:
        """Report how much accuracy formats cost in the last training batch.

        It runs the training step several more times and undoes all effects. See
        :func:`lightning_unitscale.precision_report`. Call it during a batch or right after one. A
        TensorBoard logger gets the table.
        """
        return self._reports.report(formats)

    def _note_captured(self) -> None:
        if self._steps is None:
            return
        if self._rules is not None:
            self._what_was_captured = self._steps.explain()
        elif self._steps.graph_breaks:
            self._what_was_captured = breaks_list(self._steps.graph_breaks)

    @override
    def claims(self) -> Sequence[Claim]:
        budgets = () if self.remat is None else (budget_claim(repr(self)),)
        return (*super().claims(), *budgets, *compile_claims(repr(self), self.compile))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        enter(trainer, self)
        if self._fp8 is not None:
            trainer_settings.check_fp8(trainer)
        if self.simulate is not None:
            trainer_settings.refuse_plugins(trainer, f"simulate={self.simulate.format!r}")
        if self.compile:
            refuse_distributed_tensors(trainer, f"compile={self.compile!r}")
        self._checkpoints.enter_context(
            checking_checkpoints(trainer, pl_module, self, self._method_name, self._mark)
        )
        loop = LightningLoop(trainer, pl_module)
        is_other = self._take(loop)
        if captures_steps(trainer):
            passes: list[GraphPass] = []
            if self._rules is not None:
                passes = self._rules.passes_for(
                    trainer, pl_module, is_other=is_other, is_compiled=bool(self.compile)
                )
            partitioner = None
            if self.remat is not None:
                partitioner = step_partitioner(trainer, pl_module, self.remat)
            self._steps = self._capture(trainer, pl_module, partitioner, passes)
            if self._rules is not None:
                self._rules.attach(trainer, self._steps, self._captured)
        if stage == "fit":
            self._reports.check(loop, is_captured=captures_steps(trainer))
        self._matmuls.attach(loop, is_other=is_other)

    @override
    def start(self, loop: Loop) -> None:
        if self._fp8 is not None:
            trainer_settings.check_fp8_device(loop.device)
        for option, is_asked in self._captured_for().items():
            if is_asked:
                raise ValueError(
                    f"{option}: it needs captured steps, which only a Lightning Trainer has. "
                    "Expected method='lossless' in other loops. Use lightning_unitscale.transforms "
                    "there, or a Trainer."
                )
        self._reports.check(loop)
        trainer_settings.report_unprotected(loop.module)
        self._matmuls.attach(loop, is_other=self._take(loop))

    @override
    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """Warn about an ``eps`` that is zero in the type of its parameters."""
        trainer_settings.warn_of_zero_eps([optimizer])

    def _take(self, loop: Loop) -> bool:
        """Record the measured module, and return whether it has changed."""
        is_other = self._module is not None and self._module() is not loop.module
        self._loop, self._module = loop, weakref.ref(loop.module)
        return is_other

    @override
    def begin_batch(self, batch: Any = None, batch_idx: int = 0) -> None:
        assert self._loop is not None
        if (grid := self._moving_grid()) is not None:
            grid.follow(self._loop.step_index)
        if self._rules is not None:
            self._rules.begin_batch("training_step", batch, batch_idx)
        self._reports.begin_batch(self._loop, self._matmuls.attached, batch, batch_idx)
        self._matmuls.begin_batch(batch, batch_idx)

    @override
    def end_batch(self) -> None:
        self._matmuls.end_batch()
        if self._is_checked:
            return
        texts = [] if self._rules is None else self._rules.rules.unmatched()
        if self.precision is not None and self._fp8 is not None:
            texts += self.precision.unmatched(self._fp8)
        if (options := self.precision or self.simulate) is not None:
            texts += unmatched(self._matmuls, options.exempt)
        for text in texts:
            rank_zero_warn(f"UnitScaleCallback: {text}")
        self._is_checked = True

    @override
    def begin_evaluation(self, name: str, batch: Any = None, *indices: int) -> None:
        if self._rules is not None:
            self._rules.begin_batch(name, batch, *indices)
        self._matmuls.begin_evaluation(name, batch, *indices)

    @override
    def end_evaluation(self, batch_idx: int = 0) -> None:
        self._matmuls.end_evaluation(batch_idx)

    @override
    def leave(self) -> None:
        self._note_captured()
        self._reports.leave()
        loop, self._loop, self._steps = self._loop, None, None
        with ExitStack() as leaving:  # all parts, even if one raises
            # The session is around the captured steps, so it is removed first.
            leaving.callback(self._captured.close)
            leaving.callback(self._matmuls.leave)
            if self._rules is not None and loop is not None:
                leaving.callback(keep_marking, loop.module, self._method_name)
            leaving.callback(self._checkpoints.close)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer_settings.report_unprotected(pl_module)
        trainer_settings.warn_of_zero_eps(trainer.optimizers)
        if self._rules is not None:
            self._rules.settings.start(trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._rules is not None:
            self._rules.before_optimizer_step(trainer, optimizer)

    @override
    def state_dict(self) -> dict[str, Any]:
        state = self._matmuls.state_dict()
        if not state:
            return {}
        if self._rules is not None:
            state["rules"] = {"method": self._method_name, **self._rules.state_dict()}
        if (grid := self._moving_grid()) is not None:
            state["grid_step"] = grid.step
        return state | self._reports.state_dict()

    def _mark(self, checkpoint: dict[str, Any]) -> None:
        if self._rules is not None and self._rules.rules.plan.steps():
            mark(checkpoint, self._method_name)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._rules is not None and "rules" in state_dict:
            module = None if self._module is None else self._module()
            self._rules.load_state_dict(state_dict["rules"], module)
        self._matmuls.load_state_dict(state_dict)
        self._reports.load_state_dict(state_dict)
        if (grid := self._moving_grid()) is not None:
            grid.step = state_dict.get("grid_step", 0)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process (``ddp_spawn``), which has another module."""
        state = super().__getstate__()
        return {**state, "_module": None if state["_module"] is None else nothing}

    def _moving_grid(self) -> MovingGrid | None:
        rounding = self._fp8 or self._simulation
        return None if rounding is None else rounding.moving_grid
