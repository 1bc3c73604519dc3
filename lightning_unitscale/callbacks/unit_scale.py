"""The callback that unit-scales a LightningModule without changing what it computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.callbacks.evaluation_hooks import EvaluationHooks
from lightning_unitscale.callbacks.fp8 import check_fp8, fp8_of, grid_of
from lightning_unitscale.callbacks.gauge_keeping import GaugeKeeping
from lightning_unitscale.callbacks.holding import holding_of, holds_parameters
from lightning_unitscale.callbacks.module_steps import (
    attach_steps,
    captures_steps,
    check_module,
    optimizer_step_index,
    starting_batch,
    step_arguments,
)
from lightning_unitscale.callbacks.pipelined import pipeline_of, rehearsed
from lightning_unitscale.callbacks.product_units import ProductUnits
from lightning_unitscale.callbacks.remat import step_partitioner
from lightning_unitscale.callbacks.rule_scaling import required_rules, rules_of
from lightning_unitscale.callbacks.rule_settings import start_loss_scale_at_one
from lightning_unitscale.dispatch.coverage import Coverage
from lightning_unitscale.functional.fp8_linear import DEFAULT_GRADIENT, GradientFormat
from lightning_unitscale.graph.passes import GraphPass
from lightning_unitscale.graph.steps import ModuleSteps
from lightning_unitscale.quantize import Rounding, check_rounding
from lightning_unitscale.remat.budget import check_budget
from lightning_unitscale.shadowing import nothing
from lightning_unitscale.transforms.gauge import Gauge
from lightning_unitscale.transforms.lossless import Depth, LosslessUnitScale
from lightning_unitscale.transforms.moving_grid import Grid, MovingGrid
from lightning_unitscale.transforms.rules.plan import RuleOptions
from lightning_unitscale.transforms.simulate_format import SimulateFormat, format_pair


class UnitScaleCallback(EvaluationHooks):
    """Unit-scales a LightningModule: same losses, same weights, every matrix product at RMS 1.

    Every matrix product of the module's steps, forward and backward, runs on operands in units of a
    power of two near their RMS, measured when it runs for the first time. Powers of two are exact,
    so FP32 training stays bit-identical; FP8 and FP16 products see numbers near 1. It happens at
    torch's dispatcher, below any Python code; nothing is captured and nothing runs twice.
    ``depth="all"``, the rule-based methods, ``compile``, ``remat``, held parameters and pipelines
    rewrite a captured graph. Parameters, optimizer, schedulers and checkpoints stay the user's.

    Args:
        method: ``"lossless"`` changes no result. ``"unit-scaling"`` and ``"u-mup"`` scale by rules
            and change the model: weights at RMS 1, ``1 / sqrt(fan_in)`` in the graph, residual
            branches with weights (see ``transforms.unit_scale``); they differ in ``lr_scaling``.
        depth: With ``"lossless"``: ``"products"`` gives units to what matrix products read,
            ``"all"`` to every tensor that the step keeps (for FP16).
        recalibrate: ``"auto"`` takes new units when an operand's RMS has left [1/4, 4], looking at
            steps 8, 16, 32, 64 and every 128th; a number looks and takes them every so many steps;
            ``None`` never. A new gauge changes no result and compiles nothing anew.
        replace: For the rule-based methods: functions to put in place of others, which are then not
            looked into.
        residual: For the rule-based methods: weights of residual branches with attention and of the
            others; by default u-muP's rule for depth.
        lr_scaling: For the rule-based methods: ``"match"`` keeps the relative update of every
            parameter, ``"u-mup"`` takes u-muP's rates, near 1 and the same for all widths and
            depths; ``None`` leaves rates alone. By default the one that belongs to the method.
        init_weights: For the rule-based methods: whether weights are set to RMS 1 and biases to 0,
            on the first batch, once: a checkpoint knows that it was done.
        on_unknown: For the rule-based methods, where a tensor's scale follows from no rule:
            ``"calibrate"`` measures it on the first batch, ``"keep"`` takes it for 1, ``"error"``
            raises.
        residual_mult: u-muP's share of all branches in the last sum.
        residual_attn_ratio: u-muP's share of attention branches relative to the others.
        attention_mult: u-muP's factor on attention's logits.
        activation_mult: u-muP's factor on the input of activations that follow a weight.
        loss_mult: u-muP's factor on the logits of a cross-entropy.
        simulate: Format in which matrix products are simulated, in training and in evaluation:
            ``"fp8"`` (E4M3FN for operands, E5M2 for gradients), one format such as ``"E3M2FN"`` for
            both, or one for each. Operands are rounded in units, which a product measures before it
            runs for the first time.
        simulate_rounding: ``"nearest"``, or ``"stochastic"``, whose random numbers are its own.
        precision: ``"fp8"`` runs linear layers, and their two gradients, in real FP8 with constant
            scales: those whose features are multiples of 16 and whose operands fit, when they first
            run and whenever units are looked at. It goes with any precision of the Trainer, whose
            types the results have; ``explain()`` tells what was decided on each product. FP8 needs
            a GPU of compute capability 8.9, or a CPU, where it is slow.
        fp8_exclude: Globs of module paths or tensor names to keep out of FP8; ``None`` for none.
            ``"auto"`` is the readout, by usual names, and for rule-based methods all that u-muP
            keeps out: attention's output and a feed-forward's last layer too.
        fp8_gradients: Format of the gradients that linear layers read in FP8. ``"E4M3FN"`` is for
            those that fit, which almost all do in units of their own, and ``"E5M2"``, with half its
            precision, for the others; ``"E5M2"`` is for all.
        fp8_evaluation: Whether validation, test and prediction run in FP8 too. Without it they have
            the Trainer's precision, and the loss that they find is that of the checkpoint.
        grid: Where the numbers of the format lie. ``"moving"`` multiplies what is rounded by a
            number in (1/2, 1] and divides the product by it, another one at every training step:
            with ``"fixed"``, a weight that hardly moves is rounded to the same side at every step,
            which costs a long training more than the rounding itself. ``"auto"`` moves them with
            ``precision="fp8"``, and simulates a format as it is.
        hold_parameters: Whether parameters, gradients and the optimizer's state are held in units
            while the module is trained; ``"auto"`` does with the Trainer's ``precision="16-true"``
            and ``"bf16-true"``. Checkpoints, clipping, learning rates and decay mean true values as
            ever. Callbacks that read ``parameter.grad`` or call the module outside of its steps
            need :meth:`true_parameters`. Only with ``"lossless"`` and optimizers that are known.
        remat: Budget for rematerialization, as in :class:`RematCallback`.
        compile: Run the captured graphs by Inductor. FP32 results then are those of
            ``torch.compile`` up to its rounding.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: At ``setup``, if the callback is given twice, the device or the
            precision plugin of the Trainer does not go with FP8, or the module is compiled already
            where a graph has to be captured.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_unitscale import ScaleMonitor, UnitScaleCallback
        >>> trainer = Trainer(callbacks=[UnitScaleCallback(), ScaleMonitor()])
    """

    def __init__(
        self,
        method: Literal["lossless", "unit-scaling", "u-mup"] = "lossless",
        *,
        depth: Depth = "products",
        recalibrate: Literal["auto"] | int | None = "auto",
        replace: dict[Callable[..., Any], Callable[..., Any]] | None = None,
        residual: tuple[float, float] | None = None,
        lr_scaling: Literal["match", "u-mup", "auto"] | None = "auto",
        init_weights: bool = True,
        on_unknown: Literal["calibrate", "keep", "error"] = "calibrate",
        residual_mult: float = 1.0,
        residual_attn_ratio: float = 1.0,
        attention_mult: float = 1.0,
        activation_mult: float = 1.0,
        loss_mult: float = 1.0,
        simulate: tuple[str, str] | str | None = None,
        simulate_rounding: Rounding = "nearest",
        precision: Literal["fp8"] | None = None,
        fp8_exclude: str | Sequence[str] | None = "auto",
        fp8_gradients: GradientFormat = DEFAULT_GRADIENT,
        fp8_evaluation: bool = False,
        grid: Grid | Literal["auto"] = "auto",
        hold_parameters: bool | Literal["auto"] = "auto",
        remat: str | int | float | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        options = RuleOptions(
            residual=residual,
            on_unknown=on_unknown,
            residual_mult=residual_mult,
            residual_attn_ratio=residual_attn_ratio,
            attention_mult=attention_mult,
            activation_mult=activation_mult,
            loss_mult=loss_mult,
        )
        self._rules = rules_of(method, options, replace, lr_scaling, init_weights)
        self.remat = None if remat is None else check_budget(remat, name="remat")
        is_simulated = simulate is not None
        grid = grid_of(grid, precision, is_simulated=is_simulated)
        self._fp8 = fp8_of(
            precision, fp8_exclude, method, fp8_gradients, grid, fp8_evaluation, is_simulated
        )
        self.method = method
        self.recalibrate = recalibrate
        self.compile = compile
        self._rewrite = LosslessUnitScale(depth, measures_range=self._fp8 is not None)
        self._holding = holding_of(hold_parameters, method, self._rewrite)
        self._keeping = GaugeKeeping(
            self._rewrite,
            recalibrate,
            self._rules,
            self._fp8,
            self._holding,
            is_rounded=is_simulated or self._fp8 is not None,
        )
        self._restore_loss_scale: Callable[[], None] = nothing
        check_rounding(simulate_rounding)
        self._simulation: SimulateFormat | None = None
        if simulate is not None:
            self._simulation = SimulateFormat(
                *format_pair(simulate), rounding=simulate_rounding, grid=grid
            )
        self._hold_parameters = hold_parameters
        self._products = ProductUnits(recalibrate, self._simulation, self._fp8)
        self._runs_captured = False
        self._steps: ModuleSteps | None = None
        self._module: Callable[[], pl.LightningModule | None] | None = None
        self._last_explanation = (
            "Nothing has been captured yet: run fit, validate, test or predict."
        )

    @property
    def gauge(self) -> Gauge:
        """The units in force; empty before the first batch."""
        return self._rewrite.gauge if self._runs_captured else self._products.gauge

    @property
    def coverage(self) -> Coverage:
        """What became of the products of the last step that was counted: the first, and looks.

        Empty where a captured graph is rewritten, whose products ``explain()`` lists.
        """
        return self._products.coverage

    def captures_steps(self, trainer: pl.Trainer) -> bool:
        """Whether this needs the module's steps as captured graphs."""
        if self.method != "lossless" or self._rewrite.depth == "all" or self.compile:
            return True
        return self.remat is not None or holds_parameters(self._hold_parameters, trainer)

    def explain(self) -> str:
        """What became of every product, and when units were taken."""
        if not self._runs_captured:
            return self._products.explain()
        if self._steps is None:
            return self._last_explanation
        held = [] if self._holding is None else self._holding.events
        return "\n\n".join([self._steps.explain(), *held, *self._keeping.events])

    def true_parameters(self) -> AbstractContextManager[None]:
        """Within this context the module's parameters have their true values, held or not."""
        return nullcontext() if self._holding is None else self._holding.true_parameters()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._fp8 is not None:
            check_fp8(trainer)
            # Stages are cut from one rewritten graph, whether their units are looked at or not.
            is_cut = pipeline_of(trainer) is not None
            self._fp8.takes_units_in = not is_cut or self.recalibrate is None
        is_first = self._module is None
        is_new = self._module is None or self._module() is not pl_module
        # Whoever needs graphs hides the modules that products run in.
        self._runs_captured = captures_steps(trainer)
        if not self._runs_captured:
            check_module(trainer, pl_module, self)
            self._module = weakref.ref(pl_module)
            self._products.attach(pl_module, is_new=is_new and not is_first)
            return
        if self._rules is not None:
            self._rules.attach(trainer, pl_module, is_new=is_new)
        if self._holding is not None:
            self._holding.attach(trainer, is_new=is_new)
        self._module = weakref.ref(pl_module)
        self._steps = attach_steps(trainer, pl_module, self)
        self._keeping.attach(trainer, self._steps, is_new=is_new and not is_first)
        for one in self._passes():
            if one not in self._steps.passes:
                self._steps.add_pass(one)
        if self.compile:
            self._steps.use_executor("inductor")
        if self.remat is not None:
            self._steps.partition_by(step_partitioner(trainer, pl_module, self.remat))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._rules is not None:
            self._rules.start_fit(trainer)
        elif self._rewrite.depth == "all":
            # Every gradient is near 1 then: a scale of 65,536 would overflow them.
            self._restore_loss_scale()
            self._restore_loss_scale = start_loss_scale_at_one(trainer)
        if self._holding is not None:
            self._holding.start_fit(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if (grid := self._moving_grid()) is not None:
            grid.follow(optimizer_step_index(trainer))
        if not self._runs_captured:
            self._products.before_batch(trainer)
            return
        assert self._steps is not None
        with starting_batch(pl_module, self._steps.steps["training_step"], batch_idx):
            self._plan(trainer, "training_step", batch, batch_idx)
            is_look = self._keeping.before_batch(trainer, batch, batch_idx)
        self._steps.observe(type(self).__name__, is_look)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        (self._keeping if self._runs_captured else self._products).after_batch(trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._runs_captured:
            self._keeping.before_optimizer_step(optimizer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._holding is not None:
            self._holding.start_evaluation()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._holding is not None:
            self._holding.end_evaluation()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore()

    @override
    def state_dict(self) -> dict[str, Any]:
        state = (self._keeping if self._runs_captured else self._products).state_dict()
        if not state:
            return {}
        if self._rules is not None:
            state["rules"] = self._rules.state_dict()
        is_random = self._simulation is not None and self._simulation.rounding == "stochastic"
        if self._runs_captured and self._simulation is not None and is_random:
            state["rounding"] = self._simulation.state()
        if (grid := self._moving_grid()) is not None:
            state["grid_step"] = grid.step
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "rules" in state_dict:
            module = None if self._module is None else self._module()
            required_rules(self._rules).load_state_dict(state_dict["rules"], module)
        self._keeping.load_state_dict(state_dict)
        self._products.load_state_dict(state_dict)
        if self._simulation is not None and "rounding" in state_dict:
            self._simulation.set_state(state_dict["rounding"])
        if (grid := self._moving_grid()) is not None:
            grid.step = state_dict.get("grid_step", 0)

    def __getstate__(self) -> dict[str, Any]:
        """For another process (``ddp_spawn``), in which the module is another one."""
        return {**vars(self), "_module": None if self._module is None else nothing}

    def _moving_grid(self) -> MovingGrid | None:
        one = self._fp8 or self._simulation
        return None if one is None else one.moving_grid

    def _passes(self) -> list[GraphPass]:
        rules = [] if self._rules is None else [self._rules.rules, self._rules.gradients]
        simulation = [] if self._simulation is None else [self._simulation]
        fp8 = [] if self._fp8 is None else [self._fp8]
        return [*rules, self._rewrite, *simulation, *fp8]

    def _plan(self, trainer: pl.Trainer, name: str, *batch: Any) -> None:
        if self._rules is not None:
            assert self._steps is not None
            train = name == "training_step"
            if train:
                batch = (rehearsed(trainer, batch[0]), *batch[1:])
            arguments = step_arguments(trainer.lightning_module, name, *batch)
            self._rules.plan_step(trainer, self._steps.steps[name], arguments, train=train)

    @override
    def _before_evaluation(self, trainer: pl.Trainer, name: str, batch: Any, *indices: int) -> None:
        if not self._runs_captured:
            self._products.before_evaluation(name)
            return
        assert self._steps is not None
        with starting_batch(trainer.lightning_module, self._steps.steps[name], *indices):
            self._plan(trainer, name, batch, *indices)
            self._keeping.before_evaluation(trainer, name, batch, *indices)

    @override
    def _after_evaluation(self, trainer: pl.Trainer, batch_idx: int) -> None:
        if self._runs_captured:
            self._keeping.after_evaluation(trainer)
        else:
            self._products.after_evaluation(trainer, batch_idx)

    def _restore(self) -> None:
        self._products.detach()
        if self._steps is None:
            return
        self._last_explanation = self.explain()
        self._keeping.detach()
        self._restore_loss_scale()
        self._restore_loss_scale = nothing
        if self._holding is not None:
            self._holding.release()
        if self._rules is not None:
            self._rules.restore()
        if self.remat is not None:
            self._steps.partition_by(None)
        self._steps.detach(type(self).__name__, *self._passes())
        self._steps = None
