"""Apply the rule-based methods in the callback: plan each step once, then scale the rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.optim import Optimizer

from lightning_unitscale.arguments import check_choice, check_flag, is_same, shown
from lightning_unitscale.callbacks.distributed import (
    joint_over_parts,
    pipeline_of,
    rehearsed,
    rehearsing,
)
from lightning_unitscale.callbacks.lightning_steps import (
    starting_batch,
    step_arguments,
    step_context,
)
from lightning_unitscale.callbacks.options import Rules
from lightning_unitscale.callbacks.packages import (
    is_lightning,
    is_param_in_hook_signature,
    misconfigured,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_unitscale.callbacks.trainer_settings import (
    RuleSettings,
    check_sharding,
    refuse_rate_search,
    refuse_statistics_update,
    warn_of_own_factors,
)
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.fsdp_modules import GatherParameters, ShardedModule
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.passes import GraphPass
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.loops.ranks import gathered
from lightning_unitscale.matmuls.session import SESSION
from lightning_unitscale.patching import shadowed
from lightning_unitscale.rules.build_plan import plan_step
from lightning_unitscale.rules.exchanged import PARAMETERS_ATTRIBUTE, PlannedParameters
from lightning_unitscale.rules.learning_rates import Method, Role
from lightning_unitscale.rules.plan import RuleOptions, RulePlan
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.transform import PLAN_ATTRIBUTE, Replace
from lightning_unitscale.rules.unit_weights import (
    ParameterGradients,
    already_at_unit_scale,
    set_to_unit_scale,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl

_TRAINING = "training_step"
_NOTHING_READ = "no captured graph reads a parameter"


class RuleScaling:
    """The rules of a LightningModule's steps, each planned before its first batch."""

    # Units and formats of the matmuls belong to the session, as for any captured step.

    def __init__(
        self,
        method: Rules,
        options: RuleOptions,
        replace: Replace | None,
        lr_scaling: Method | None,
        init_weights: bool,
    ) -> None:
        self.options = options
        self.init_weights = init_weights
        self.rules = RuleRewrite(options, replace)
        self.gradients = ParameterGradients()
        self.parameters = PlannedParameters()
        self._method = method
        self._trainer: pl.Trainer | None = None
        self._steps: ModuleSteps | None = None
        self._sharded: ShardedModule | None = None
        self.settings = RuleSettings(lr_scaling)
        self._rates_follow = False
        self._is_plain = False  # true while an unscaled module is evaluated

    def passes_for(
        self, trainer: pl.Trainer, module: pl.LightningModule, *, is_other: bool, is_compiled: bool
    ) -> list[GraphPass]:
        """Return the passes over the steps. Use the module's own plan, if it has one."""
        is_sharded = is_lightning(trainer.strategy, "ModelParallelStrategy")
        check_sharding(trainer, self._method, is_sharded=is_sharded, is_compiled=is_compiled)
        refuse_rate_search(trainer)
        refuse_statistics_update(trainer, module)
        if is_other or not self.rules.plan.steps():
            self.rules.plan = vars(module).get(PLAN_ATTRIBUTE, RulePlan())
            self.gradients.clear()
        self.parameters = vars(module).get(PARAMETERS_ATTRIBUTE) or PlannedParameters()
        self._sharded = ShardedModule(module) if is_sharded else None
        gathering = [] if self._sharded is None else [GatherParameters(self._sharded)]
        return [self.rules, self.gradients, *gathering]

    def attach(self, trainer: pl.Trainer, steps: ModuleSteps, leaving: ExitStack) -> None:
        """Scale captured steps that have the passes, until ``leaving`` is closed."""
        leaving.callback(self._leave)
        steps.sharded = self._sharded
        self._trainer, self._steps = trainer, steps
        for step in steps.steps.values():
            step.before_call = _ExchangeHook(self)

    def _leave(self) -> None:
        """Undo changes outside the module's steps."""
        if self._steps is not None:
            self._steps.sharded = None
            for step in self._steps.steps.values():
                step.before_call = None
        self._trainer = self._steps = None
        self.settings.restore()
        self.gradients.remove()
        self._rates_follow = False
        self._is_plain = False

    def begin_batch(self, name: str, batch: Any, *indices: int) -> None:
        """Plan a step by the rules, if they have not planned it before."""
        trainer, steps = self._trainer, self._steps
        assert trainer is not None and steps is not None
        step, module = steps.steps[name], trainer.lightning_module
        is_training = name == "training_step"
        if is_training and step.fallback.is_due(steps.executor):
            return
        with starting_batch(module, step, *indices):
            seen = rehearsed(trainer, batch) if is_training else batch
            arguments = step_arguments(module, name, seen, *indices)
            self._plan_step(trainer, step, arguments, train=is_training)

    def _plan_step(
        self, trainer: pl.Trainer, step: CapturedStep, arguments: tuple[Any, ...], *, train: bool
    ) -> None:
        """Plan a step on its first batch. Before the first training step, set the weights."""
        # An evaluation never changes weights. Before a training by rules, the model is unscaled,
        # and without a loss its readout could not be found. So a sanity check stays unscaled. An
        # evaluation on its own does too, unless its weights are at unit scale. A training step that
        # cannot be captured trains the unscaled model, with a warning.
        module = trainer.lightning_module
        is_trained = _TRAINING in self.rules.plan.steps()
        is_awaited = not train and not is_trained and trainer.state.fn == "fit"
        sharded = step.owner.sharded
        is_cut = pipeline_of(trainer) is not None or sharded is not None
        step.fallback.await_rules(is_awaited and not is_cut)
        is_new = step.name not in self.rules.plan.steps()
        if is_new and not self._is_plain and not is_awaited:
            if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
                raise misconfigured(
                    f"method: {type(module).__name__}.training_step takes dataloader_iter, so it "
                    "cannot be tried on one batch first. Expected a step that takes a batch. Use "
                    "method='lossless', or let the step take the batch."
                )
            # Plans of an earlier evaluation are useless for training, because it has no gradients.
            earlier = RulePlan() if train else self.rules.plan
            shapes = rehearsing(trainer) if train else nullcontext()
            may_refuse = train and not is_trained and not is_cut
            try:
                with (
                    shadowed(step.recaptures, is_limited=may_refuse),
                    step_context(trainer, step.name),
                    shapes,
                    nullcontext() if sharded is None else sharded.gathered(),
                ):
                    planned = plan_step(
                        step,
                        arguments,
                        {},
                        self.options,
                        earlier,
                        init_weights=self.init_weights and not (is_trained and not train),
                        backward=train,
                        joint=joint_over_parts(trainer),
                    )
                if may_refuse and planned.unseen and not planned.parameters:
                    raise CaptureError.of(step.title, step.graph_breaks or [_NOTHING_READ])
            except CaptureError as error:
                if not may_refuse:
                    raise
                self.settings.restore()
                step.fallback.stay_plain(error.reason)
                return
            plan = _agreed(trainer, planned)
            if train:
                plan = self._with_weights(module, plan)
            elif not is_trained and self._stays_plain(module, step.name, plan):
                return
            self._adopt(module, plan, [step])
        if train:
            self.gradients.start(trainer.accumulate_grad_batches)
            if not self._rates_follow:
                if sharded is not None:
                    sharded.shard()
                self._rates_follow = True
                # Every sharding makes other parameters.
                if is_new or is_cut or not self.parameters.infos:
                    self.parameters.record(module, self.rules.plan)
                vars(module)[PARAMETERS_ATTRIBUTE] = self.parameters
                self.settings.follow_rates(trainer, self.parameters.infos)

    def before_optimizer_step(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        """Give a factor to each gradient that has none yet, so that its RMS is 1."""
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = trainer.lightning_module.named_parameters()
        own = [(fqn, parameter) for fqn, parameter in named if id(parameter) in updated]
        factors = self.gradients.log2_factors
        is_first, has_none = not factors, all(fqn not in factors for fqn, _ in own)
        self.gradients.scale_new(own)
        if has_none:  # the first step of this optimizer, of several under manual optimization
            self.gradients.settle()
        if not is_first:
            return
        if pipeline_of(trainer) is not None:
            # A rank has gradients of its own stages only, and any rank may write the checkpoint.
            for of_rank in gathered(factors):
                factors.update(of_rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, so that nothing is planned or measured twice."""
        self.gradients.settle()
        return {
            "plan": self.rules.plan.state(),
            "log2_gradients": dict(self.gradients.log2_factors),
            "measures_late": self.gradients.measures_late,
            "num_accumulated": self.gradients.num_accumulated,
        }

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module | None) -> None:
        """Continue from :meth:`state_dict`. The weights are those of the checkpoint."""
        self.rules.plan = RulePlan.from_state(state["plan"])
        self.gradients.log2_factors = dict(state["log2_gradients"])
        self.gradients.num_accumulated = state["num_accumulated"]
        self.gradients.measures_late = state["measures_late"]
        if module is not None:
            vars(module)[PLAN_ATTRIBUTE] = self.rules.plan
            self.parameters = PlannedParameters()

    def plan_exchanged(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Plan parameters that the user exchanged since the last plan, before a call reads them."""
        # A layer that replaces another one in the middle of a training, or between two, is treated
        # as one that was there from the start: its weights are set to unit scale, and its
        # operations, gradients and rates get their own factors.
        trainer, module, plan = self._trainer, step.owner.module, self.rules.plan
        is_cut = trainer is not None and pipeline_of(trainer) is not None
        # Parts of a cut module have their own parameters.
        if trainer is None or is_cut or step.owner.sharded or _TRAINING not in plan.steps():
            return
        exchanged = self.parameters.find_exchanged(module, plan)
        self.parameters.refuse_merged(step.title, plan)
        if step.name != _TRAINING:
            self.parameters.refuse_in_evaluation(step.title, module, plan, exchanged)
            return
        if not exchanged:
            return
        with SESSION.being(None), rehearsing(trainer):
            planned = plan_step(
                step,
                args,
                kwargs,
                self.options,
                plan.without(exchanged, step.name),
                init_weights=self.init_weights,
                joint=joint_over_parts(trainer),
            )
        planned, scaled = self.parameters.settle(module, _agreed(trainer, planned), plan, exchanged)
        self._adopt(module, planned, cast(ModuleSteps, step.owner).steps.values())
        self.parameters.record(module, planned)
        self.gradients.forget(exchanged)
        self.settings.follow_rates(trainer, self.parameters.infos)
        rank_zero_info(
            f"UnitScaleCallback: {type(module).__name__} has new parameters "
            f"({', '.join(exchanged)}). Their operations get factors of their own. "
            f"Set to unit scale: {', '.join(scaled) or 'none, since they are already'}."
        )

    def _adopt(self, module: nn.Module, plan: RulePlan, steps: Iterable[CapturedStep]) -> None:
        """Take a plan, and rewrite the graphs of the steps that it changes."""
        if _TRAINING in self.rules.plan.steps():
            warn_of_own_factors(plan, self.rules.plan)
        self.rules.plan = vars(module)[PLAN_ATTRIBUTE] = plan
        for step in steps:
            step.invalidate()

    def _with_weights(self, module: pl.LightningModule, plan: RulePlan) -> RulePlan:
        """Return the plan of a module that is trained for the first time, and set its weights."""
        if not self.init_weights:
            return plan
        if already_at_unit_scale(module, plan.parameters):
            rank_zero_info(
                f"UnitScaleCallback: the weights of {type(module).__name__} have RMS near 1 "
                "already, as after training at unit scale. They do not change. Scales that depend "
                "on the data are measured again. Pass ckpt_path to the Trainer to restore those "
                "of the checkpoint."
            )
            if self.settings.lr_scaling == "match":
                rank_zero_warn(
                    f"lr_scaling='match': the RMS that the weights of {type(module).__name__} had "
                    "as an unscaled model is not known, so their learning rates are not scaled. "
                    "Expected the checkpoint that they come from. Pass ckpt_path to the Trainer."
                )
            return plan
        kept = next((fqn for fqn in plan.parameters if fqn.endswith("weight")), None)
        if kept and all(parameter.action == "left" for parameter in plan.parameters.values()):
            rank_zero_warn(
                f"{type(module).__name__}.training_step: the rules scale none of its weights "
                f"({kept}: {plan.parameters[kept].reason}). explain() lists all of them."
            )
        return replace(plan, parameters=set_to_unit_scale(module, plan.parameters))

    def _stays_plain(self, module: pl.LightningModule, step: str, plan: RulePlan) -> bool:
        """Check whether an evaluated module was never trained by rules, and so runs unscaled."""
        if not self.init_weights:
            return False
        name = type(module).__name__
        if not already_at_unit_scale(module, plan.parameters):
            self._is_plain = True
            rank_zero_info(
                f"UnitScaleCallback: {name} has not been trained at unit scale, so it is evaluated "
                "as it is. The first batch of a fit sets its weights to unit scale."
            )
            return True
        if all(param.info.role is not Role.READOUT for param in plan.parameters.values()):
            raise misconfigured(
                f"{name}.{step}: the weights have RMS near 1, as after training at unit scale, "
                "but this step returns no loss, so the readout is not known. Expected the "
                "checkpoint of the weights. Pass it as ckpt_path to the Trainer."
            )
        return False


def _agreed(trainer: pl.Trainer, plan: RulePlan) -> RulePlan:
    """Return the plan of the first rank, since measurements differ but the model must not."""
    return RulePlan.from_state(trainer.strategy.broadcast(plan.state()))


class _ExchangeHook:
    """Hook of a step that plans exchanged parameters. A copied module has none."""

    def __init__(self, scaling: RuleScaling) -> None:
        self._scaling = scaling

    def __call__(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._scaling.plan_exchanged(step, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def rules_of(
    method: str | Rules,
    *,
    replace: Replace | None,
    residual: tuple[float, float] | None,
    lr_scaling: str | None,
    init_weights: bool,
    on_unknown: str,
) -> RuleScaling | None:
    """Return the rules of a method, with its own learning rates by default."""
    check_flag("init_weights", init_weights)
    if not isinstance(method, Rules):
        for name, value, expected in (
            ("replace", replace, None),
            ("residual", residual, None),
            ("lr_scaling", "auto" if lr_scaling is None else lr_scaling, "auto"),
            ("init_weights", init_weights, True),
            ("on_unknown", on_unknown, "calibrate"),
        ):
            if not is_same(value, expected):
                raise ValueError(
                    f"{name}={shown(value)}: has no effect with method='lossless', which changes "
                    f"no result. Expected {expected!r}. Leave {name} out."
                )
        return None
    if lr_scaling is not None:
        advice = "leave it out for the rates that belong to the method, or pass None to scale none"
        check_choice("lr_scaling", lr_scaling, ("match", "u-mup", "auto"), "unknown choice", advice)
    rates = _RATES[method.method] if lr_scaling == "auto" else cast(Method | None, lr_scaling)
    options = method.options(residual=residual, on_unknown=on_unknown)
    return RuleScaling(method, options, replace, rates, init_weights)


_RATES: dict[str, Method] = {"unit-scaling": "match", "u-mup": "u-mup"}
