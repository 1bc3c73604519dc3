"""Train the demo's GPT with its matmuls in low precision, by several methods.

The model, the text and the optimizer are those of ``configs/gpt_unit_scaled.yaml``; formats are
simulated, so that any machine gives the numbers. What differs is what the matmuls read:

- ``BF16``, ``FP16``, ``E4M3/E5M2``, ... "plain": operands and gradients rounded as they are;
- "dynamic": as torchao's tensorwise float8 training scales them, each tensor by the format's
  maximum over its own largest magnitude at every use; "powers of two": rounded down to one;
- "lossless": in units of powers of two measured once, on the first batch, and never updated;
  "followed": measured again at the steps at which ``recalibrate="auto"`` looks; "moving grid":
  multiplied before the rounding by numbers in (1/2, 1] that are others at every step;
- "rules": the model unit-scaled by rules, with learning rates that keep its relative updates, which
  is another model whose best rate is elsewhere; "u-mup": at the rate of ``configs/gpt_u_mup.yaml``;
- "NVFP4", "MXFP8", ...: in blocks. NVFP4's scale of a tensor is its unit, a constant ("lossless"),
  or each tensor's own largest magnitude at every use ("none"). A count says how many blocks have
  the same bits with both scales, during the training with the constant;
- "real FP8": linear layers through FP8 matmuls, as a GPU runs them, and other matmuls in FP32.

The setting is one in which naive low precision visibly suffers: a loss that is a mean over all
bytes of a batch and weights of standard deviation 0.02 put gradients near 1e-6 and below, for which
FP8 has no numbers. No loss scaler is used anywhere: doing without it is the point.

    python benchmarks/low_precision_training.py --seeds 3 --steps 400
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.demo_step import VOCABULARY
from benchmarks.measure import RESULTS, machine
from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_unitscale.callbacks.matmul_units import RecalibrationSchedule
from lightning_unitscale.capture.module_steps import matmuls_of, steps_of
from lightning_unitscale.capture.name_patterns import NamePatterns
from lightning_unitscale.formats import NumberFormat, get_number_format
from lightning_unitscale.formats.round_numbers import rounded_blocks
from lightning_unitscale.matmuls import rounding
from lightning_unitscale.matmuls.execute import Matmul
from lightning_unitscale.matmuls.rounding import Numerics
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from lightning_unitscale.matmuls.torch_internals import Kernel
from lightning_unitscale.matmuls.units import Units
from lightning_unitscale.quantize import quantize
from lightning_unitscale.rules.learning_rates import ParameterInfo
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.scaled_step import scale_learning_rates
from lightning_unitscale.transforms import (
    fp8_linears,
    lossless_unit_scale,
    simulate_format,
    unit_scale,
)

Batch = tuple[Tensor, Tensor]
PLOTS = Path(__file__).parents[1] / "docs" / "images"

# configs/gpt_unit_scaled.yaml, and rate and weight decay of configs/gpt_u_mup.yaml.
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.95)
U_MUP = (2.0, 1.2e-4)
WARMUP, CLIP, CONTEXT = 30, 1.0, 128


class Loss(nn.Module):
    """The demo's GPT with its loss: ``(tokens, targets) -> loss``."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.gpt = GPT(width=width, depth=depth, num_heads=4, context=CONTEXT)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.gpt(tokens)
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


class DynamicScaling(Numerics):
    """Rounds like :class:`SimulateFormat`, but each tensor scaled to the format's full range.

    References:
        torchao, ``float8`` training, tensorwise recipe: scale = max of the format / amax.
    """

    name = "dynamic scaling"

    def __init__(
        self,
        fwd_format: str,
        bwd_format: str,
        exclude: tuple[str, ...] = (),
        powers_of_two: bool = False,
    ) -> None:
        self.patterns = NamePatterns(exclude=exclude or None)
        self.powers_of_two = powers_of_two
        self.fwd_format, self.bwd_format = (
            get_number_format(fwd_format),
            get_number_format(bwd_format),
        )

    def why_not(self, matmul: Matmul, *_: Any) -> str | None:
        return self.patterns.why_not(matmul.site.name, matmul.site.module) or None

    def run(self, matmul: Matmul, original: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
        for position, _, is_gradient, _ in matmul.places():
            format = self.bwd_format if is_gradient else self.fwd_format
            args[position] = _scaled_to_range(args[position], format, self.powers_of_two)
        return original(*args, **kwargs)


def _scaled_to_range(tensor: Tensor, format: NumberFormat, powers_of_two: bool) -> Tensor:
    # torchao takes the quotient in FP64 and bounds amax from below in the same way.
    amax = tensor.detach().abs().max().double().clamp_min(1e-12)
    factor = (format.max / amax).float()
    if powers_of_two:
        factor = factor.log2().floor().exp2()
    return quantize(tensor * factor, format, saturate=True) / factor


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    matmuls: str
    scaling: str
    make: Callable[[Loss, Batch], nn.Module]
    dtype: torch.dtype = torch.float32
    by_rules: Literal["match", "u-mup"] | None = None
    follows: bool = False

    @property
    def name(self) -> str:
        return f"{self.matmuls}, {self.scaling}"


def _plain(forward: str, backward: str, **options: Any) -> Callable[[Loss, Batch], nn.Module]:
    return lambda module, batch: simulate_format(module, forward, backward, **options)


def _lossless(forward: str, backward: str, **options: Any) -> Callable[[Loss, Batch], nn.Module]:
    return lambda module, batch: simulate_format(
        lossless_unit_scale(module, *batch), forward, backward, **options
    )


def _dynamic(forward: str, backward: str, **options: Any) -> Callable[[Loss, Batch], nn.Module]:
    def prepare(module: Loss, batch: Batch) -> nn.Module:
        new = copy.deepcopy(module)
        numerics = [DynamicScaling(forward, backward, **options)]
        AttachedSession(new, ["forward"], Units(is_used=False), numerics)
        return new

    return prepare


def _rules(forward: str, backward: str) -> Callable[[Loss, Batch], nn.Module]:
    return lambda module, batch: simulate_format(unit_scale(module), forward, backward)


def _real_fp8(exclude: str | None) -> Callable[[Loss, Batch], nn.Module]:
    def prepare(module: Loss, batch: Batch) -> nn.Module:
        units = lossless_unit_scale(module, *batch)
        return fp8_linears(units, exclude=exclude, gradient_format="E5M2")

    return prepare


SR: dict[str, Any] = {"rounding": "stochastic"}
# The recipe of arXiv 2509.25149, but for the layers that it leaves in BF16.
PUBLISHED: dict[str, Any] = {
    "gradient_rounding": "stochastic",
    "square_weights": True,
    "hadamard": True,
}
FP8, E4M3 = ("E4M3FN", "E5M2"), ("E4M3FN", "E4M3FN")
# What is usually left out of FP8: attention's two matmuls, and the readout.
ATTENTION, READOUT = ("*.scaled_dot_product_attention",), ("*head.linear",)
BEYOND_LINEARS = ATTENTION + READOUT
# What u-muP's authors leave out as well (arXiv 2407.17465): the last layer of every branch.
LAST_LAYERS = ("*attention.out.linear", "*mlp.down.linear")


# How far the weights of a training that is as good as the same begin from its own.
NUDGES = (1e-6, 2e-6)


def _nudged(module: Loss, batch: Batch, by: float = 1e-6) -> Loss:
    """As good as the same training: what is between the two is chance."""
    with torch.no_grad():
        for one in module.parameters():
            one.mul_(1 + by)
    return module


def _nudged_first(
    make: Callable[[Loss, Batch], nn.Module], by: float
) -> Callable[[Loss, Batch], nn.Module]:
    """What is between a method and this is chance too."""
    return lambda module, batch: make(_nudged(module, batch, by), batch)


def _rounded_once(module: Loss, batch: Batch) -> nn.Module:
    """Weights perturbed once, at the start, by as much as FP8 rounds: the resulting difference."""
    with torch.no_grad():
        for one in (one for one in module.parameters() if one.ndim >= 2):
            scale = one.square().mean().sqrt()
            one.copy_(quantize(one / scale, "E4M3FN") * scale)
    return module


METHODS = [
    Method("FP32", "none", lambda module, batch: module),
    Method("FP32, weights x 1.000001", "none", _nudged),
    Method("FP32, weights once in E4M3", "none", _rounded_once),
    Method("BF16 autocast", "none", lambda module, batch: module, torch.bfloat16),
    Method("FP32", "rules", lambda module, batch: unit_scale(module), by_rules="match"),
    Method("FP32", "u-mup", lambda module, batch: unit_scale(module), by_rules="u-mup"),
    Method("FP16", "none", _plain("FP16", "FP16")),
    Method("FP16", "lossless", _lossless("FP16", "FP16")),
    Method("E4M3/E5M2", "none", _plain("E4M3FN", "E5M2")),
    Method("E4M3/E5M2", "dynamic", _dynamic("E4M3FN", "E5M2")),
    Method("E4M3/E5M2", "lossless", _lossless("E4M3FN", "E5M2")),
    Method("E4M3/E5M2, linears in blocks", "dynamic", _dynamic(*FP8, exclude=BEYOND_LINEARS)),
    Method(
        "E4M3/E5M2, linears in blocks",
        "dynamic, powers of two",
        _dynamic(*FP8, exclude=BEYOND_LINEARS, powers_of_two=True),
    ),
    Method("E4M3/E5M2, linears in blocks", "lossless", _lossless(*FP8, exclude=BEYOND_LINEARS)),
    Method(
        "E4M3/E5M2, linears in blocks",
        "lossless, followed",
        _lossless(*FP8, exclude=BEYOND_LINEARS),
        follows=True,
    ),
    Method(
        "E4M3/E5M2, linears in blocks",
        "lossless, moving grid",
        _lossless(*FP8, exclude=BEYOND_LINEARS, grid="moving"),
    ),
    *(
        Method(
            f"E4M3/E5M2, linears in blocks, weights x {1 + by}",
            "dynamic",
            _nudged_first(_dynamic(*FP8, exclude=BEYOND_LINEARS), by),
        )
        for by in NUDGES
    ),
    Method("E4M3/E4M3, linears in blocks", "dynamic", _dynamic(*E4M3, exclude=BEYOND_LINEARS)),
    Method("E4M3/E4M3, linears in blocks", "lossless", _lossless(*E4M3, exclude=BEYOND_LINEARS)),
    Method(
        "E4M3/E4M3, linears in blocks",
        "lossless, moving grid",
        _lossless(*E4M3, exclude=BEYOND_LINEARS, grid="moving"),
    ),
    Method(
        "E4M3/E4M3, linears in blocks",
        "followed, moving grid",
        _lossless(*E4M3, exclude=BEYOND_LINEARS, grid="moving"),
        follows=True,
    ),
    *(
        Method(
            f"E4M3/E4M3, linears in blocks, weights x {1 + by}",
            "followed, moving grid",
            _nudged_first(_lossless(*E4M3, exclude=BEYOND_LINEARS, grid="moving"), by),
            follows=True,
        )
        for by in NUDGES
    ),
    Method(
        "E4M3/E5M2, linears, u-mup's choice",
        "lossless",
        _lossless(*FP8, exclude=BEYOND_LINEARS + LAST_LAYERS),
    ),
    Method(
        "E4M3/E5M2, linears, u-mup's choice",
        "dynamic",
        _dynamic(*FP8, exclude=BEYOND_LINEARS + LAST_LAYERS),
    ),
    Method(
        "E4M3/E4M3, linears, u-mup's choice",
        "followed, moving grid",
        _lossless(*E4M3, exclude=BEYOND_LINEARS + LAST_LAYERS, grid="moving"),
        follows=True,
    ),
    Method("E4M3/E5M2, all but readout", "lossless", _lossless(*FP8, exclude=READOUT)),
    Method("E4M3/E5M2, all but attention", "lossless", _lossless(*FP8, exclude=ATTENTION)),
    Method("E4M3/E5M2", "rules", _rules("E4M3FN", "E5M2"), by_rules="match"),
    Method("E4M3/E5M2", "u-mup", _rules("E4M3FN", "E5M2"), by_rules="u-mup"),
    Method("real FP8 linears", "lossless", _real_fp8("*head")),
    Method("real FP8 linears, readout too", "lossless", _real_fp8(None)),
    Method("E4M3/E4M3", "lossless", _lossless(*E4M3)),
    Method("E4M3/E4M3", "lossless, moving grid", _lossless(*E4M3, grid="moving")),
    Method("NVFP4", "none", _plain("NVFP4", "NVFP4")),
    Method("NVFP4", "lossless", _lossless("NVFP4", "NVFP4")),
    Method("NVFP4, as published", "none", _plain("NVFP4", "NVFP4", **PUBLISHED)),
    Method("NVFP4, as published", "lossless", _lossless("NVFP4", "NVFP4", **PUBLISHED)),
    Method("MXFP8", "lossless", _lossless("MXFP8", "MXFP8")),
    Method("MXFP4", "lossless", _lossless("MXFP4", "MXFP4")),
    Method("E3M2", "dynamic", _dynamic("E3M2FN", "E3M2FN")),
    Method("E3M2", "lossless", _lossless("E3M2FN", "E3M2FN")),
    Method("E3M2", "lossless, followed", _lossless("E3M2FN", "E3M2FN"), follows=True),
    Method("E3M2 stochastic", "lossless", _lossless("E3M2FN", "E3M2FN", **SR)),
    Method("E2M3 stochastic", "lossless", _lossless("E2M3FN", "E2M3FN", **SR)),
    Method("E2M1 stochastic", "lossless", _lossless("E2M1FN", "E2M1FN", **SR)),
]


class BlockCounts:
    """How many blocks have the same bits with the unit as NVFP4's scale as with one per call."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.is_counting = False

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Compare what simulated matmuls round to NVFP4 by a constant, while it is asked for."""

        def compared(tensor: Tensor, format: Any, axes: Any, scale: Any, *others: Any) -> Tensor:
            result = rounded_blocks(tensor, format, axes, scale, *others)
            if self.is_counting and scale is not None and others in ((), (None, False)):
                self._compare(tensor, format, axes, result)
            return result

        rounding.rounded_blocks = compared
        try:
            yield
        finally:
            rounding.rounded_blocks = rounded_blocks

    def _compare(self, tensor: Tensor, format: Any, axes: Any, constant: Tensor) -> None:
        own = tensor.abs().amax() / format.largest_block
        others = {"own": own, "own, a power of two": own.log2().ceil().exp2()}
        size, total = format.block_size, tensor.square().sum()

        def in_blocks(one: Tensor) -> Tensor:
            flat = one.movedim(axes, tuple(range(-len(axes), 0))).flatten(-len(axes))
            return F.pad(flat, (0, -flat.shape[-1] % size)).unflatten(-1, (-1, size))

        ours, is_some = in_blocks(constant), (in_blocks(tensor) != 0).any(-1)
        self.numbers["tensors"] += 1
        self.numbers["blocks"] += int(is_some.sum())
        self.numbers["error, constant"] += float((constant - tensor).square().sum() / total)
        for name, scale in others.items():
            other = rounded_blocks(tensor, format, axes, scale)
            same = (in_blocks(other) == ours).all(-1) & is_some
            self.numbers[f"equal, {name}"] += int(same.sum())
            self.numbers[f"error, {name}"] += float((other - tensor).square().sum() / total)

    def shares(self) -> dict[str, float]:
        """Return the share of equal blocks, and the mean relative squared errors of tensors."""
        return {
            name: round(number / self.numbers["blocks" if "equal" in name else "tensors"], 6)
            for name, number in self.numbers.items()
            if "," in name
        } | {"blocks": self.numbers["blocks"]}


BLOCKS = BlockCounts()
_COUNT_EVERY = 20


@dataclass(frozen=True)
class Outcome:
    """Of one training.

    Attributes:
        validation: Final validation loss, computed as the training was.
        checkpoint: That of the same weights in FP32: of the checkpoint that the training leaves.
        losses: Training loss of every step.
    """

    validation: float
    checkpoint: float | None
    losses: list[float]


def train(method: Method, seed: int, args: argparse.Namespace) -> Outcome:
    torch.manual_seed(seed)
    plain = Loss(args.width, args.depth)
    data = TextDataModule(
        context=CONTEXT, batch_size=args.batch_size, val_samples=args.val_samples, seed=seed
    )
    data.text = _text(data)
    batches = endless_batches(data)
    first = next(batches)
    module = method.make(plain, first)
    if args.executor != "eager" and (steps := steps_of(module)) is not None:
        steps.use_executor(args.executor)
    elif args.executor != "eager":
        module.compile(backend=args.executor)
    rates = U_MUP if method.by_rules == "u-mup" else (args.learning_rate, WEIGHT_DECAY)
    optimizer, schedule = optimizer_of(module, args.steps, *rates)
    clip = CLIP
    if method.by_rules is not None:
        with torch.random.fork_rng():
            module(*first)  # decides on every operation, and sets the weights
        scale_learning_rates(optimizer, parameter_infos(module), method.by_rules)
        # Gradients at unit scale have RMS 1 each, and the threshold is meant for a norm near 1.
        clip *= math.sqrt(sum(one.numel() for one in module.parameters()))
    losses = []
    batch = first
    looks = RecalibrationSchedule("auto" if method.follows else None)
    for step in range(args.steps):
        if looks.measures_at(step):
            take_new_units(module, batch)
        with torch.autocast("cpu", method.dtype, enabled=method.dtype is not torch.float32):
            BLOCKS.is_counting = method.name == "NVFP4, lossless" and step % _COUNT_EVERY == 0
            loss = module(*batch)
        loss.backward()
        BLOCKS.is_counting = False
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
        batch = next(batches)
    validation = list(data.val_dataloader())
    with torch.autocast("cpu", method.dtype, enabled=method.dtype is not torch.float32):
        evaluated = evaluate(module, validation)
    checkpoint = None
    if method.by_rules is None:  # by rules, the module as written is another function
        plain.load_state_dict(module.state_dict())
        checkpoint = evaluate(plain, validation)
    return Outcome(evaluated, checkpoint, losses)


@torch.no_grad()
def evaluate(module: nn.Module, batches: list[Batch]) -> float:
    return statistics.fmean(float(module(*one)) for one in batches)


def take_new_units(module: nn.Module, batch: Batch) -> None:
    """Measure a lossless module again, as the callback does when an operand left [1/4, 4]."""
    matmuls_of(module).measure(batch, {})


_texts: list[Any] = []


def _text(data: TextDataModule) -> Any:
    """The text, read once: it does not depend on the seed."""
    if not _texts:
        _texts.append(data.text)
    return _texts[0]


def endless_batches(data: TextDataModule) -> Iterator[Batch]:
    """Training batches, epoch after epoch."""
    while True:
        yield from data.train_dataloader()


def optimizer_of(module: nn.Module, steps: int, rate: float, decay: float) -> tuple[Any, Any]:
    """What ``GPT.configure_optimizers`` makes for a run of this length."""
    matrices = [one for one in module.parameters() if one.ndim >= 2]
    vectors = [one for one in module.parameters() if one.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, rate, BETAS)

    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / (WARMUP + 1)
        progress = min(1.0, (step - WARMUP) / max(1, steps - WARMUP))
        return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def parameter_infos(module: nn.Module) -> dict[Tensor, ParameterInfo]:
    steps = steps_of(module)
    assert steps is not None
    (rules,) = (one for one in steps.passes if isinstance(one, RuleRewrite))
    known = rules.plan.parameters
    return {one: known[fqn].info for fqn, one in module.named_parameters() if fqn in known}


Losses = dict[str, dict[int, float]]


def table(results: Losses, checkpoints: Losses) -> list[dict[str, Any]]:
    """One row per method: mean, spread over the seeds, and the mean of the ratios to FP32."""
    reference = results[METHODS[0].name]
    rows = []
    for method in METHODS:
        losses = results.get(method.name)
        if not losses:
            continue
        ratios = [losses[seed] / reference[seed] for seed in losses]
        found = checkpoints.get(method.name, {})
        exact = [loss / reference[seed] for seed, loss in found.items()]
        rows.append(
            {
                "matmuls in": method.matmuls,
                "scaling": method.scaling,
                "validation loss": round(statistics.fmean(losses.values()), 4),
                "spread": round(max(losses.values()) - min(losses.values()), 4),
                "to FP32": f"{100 * (statistics.fmean(ratios) - 1):+.2f} %",
                "worst seed": f"{100 * (max(ratios) - 1):+.2f} %",
                "its checkpoint in FP32": f"{100 * (statistics.fmean(exact) - 1):+.2f} %"
                if exact
                else "",
            }
        )
    return rows


def plot(curves: dict[str, list[float]], setting: str, path: Path) -> None:
    """Training losses of the first seed, smoothed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown: dict[str, Any] = {"none": "--", "dynamic": ":", "lossless": "-"}
    shown |= {"lossless, followed": (0, (5, 1)), "rules": "-.", "u-mup": "-."}
    shown |= {"dynamic, powers of two": (0, (1, 3)), "lossless, moving grid": (0, (8, 1))}
    shown["followed, moving grid"] = (0, (12, 1))
    # The reference in black, over the others: it lies below some of them.
    colors: dict[str, Any] = {METHODS[0].matmuls: "black"}
    figure, axes = plt.subplots(figsize=(7.5, 4.5), constrained_layout=True)
    for method in METHODS:
        if method.name not in curves:
            continue
        losses = torch.tensor(curves[method.name])
        width = max(1, len(losses) // 20)
        smooth = losses.unfold(0, width, 1).mean(1)
        color = colors.setdefault(method.matmuls, f"C{len(colors)}")
        steps = range(width, width + len(smooth))
        style = shown[method.scaling]
        layer = 3 if method is METHODS[0] else 2
        axes.plot(steps, smooth, ls=style, color=color, label=method.name, lw=1.3, zorder=layer)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per byte")
    axes.set_title(setting, fontsize=9)
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many, starting from 1")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--val-samples", type=int, default=512)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--executor", choices=["eager", "aot_eager", "inductor"], default="eager")
    # Not "--only": Inductor looks for that in the arguments, and writes what follows into its code.
    parser.add_argument(
        "--methods", nargs="+", default=[""], help="run those whose name contains one of these"
    )
    parser.add_argument(
        "--name", default="low_precision_training", help="of the result file and of the plot"
    )
    parser.add_argument("--resume", action="store_true", help="keep what the result file has")
    args = parser.parse_args()

    setting = {
        key: getattr(args, key)
        for key in ("steps", "learning_rate", "batch_size", "val_samples", "executor")
    }
    if (args.width, args.depth) != (128, 4):
        setting |= {"width": args.width, "depth": args.depth}
    path = RESULTS / f"{args.name}.json"
    results: Losses = {}
    checkpoints: Losses = {}
    curves: dict[str, list[float]] = {}
    if args.resume and path.exists():
        stored = json.loads(path.read_text())
        if stored["setting"] == setting:
            results, checkpoints = (
                {
                    name: {int(seed): loss for seed, loss in losses.items()}
                    for name, losses in stored[key].items()
                }
                for key in ("losses", "checkpoints")
            )
            curves = stored["curves"]
            BLOCKS.numbers.update(stored.get("block counts", {}))
    for seed in range(1, args.seeds + 1):
        for method in METHODS:
            wanted = method is METHODS[0] or any(one in method.name for one in args.methods)
            if not wanted or seed in results.get(method.name, {}):
                continue
            start = time.perf_counter()
            with BLOCKS.counting():
                outcome = train(method, seed, args)
            results.setdefault(method.name, {})[seed] = outcome.validation
            if outcome.checkpoint is not None:
                checkpoints.setdefault(method.name, {})[seed] = outcome.checkpoint
            if seed == 1:
                curves[method.name] = [round(one, 4) for one in outcome.losses]
            seconds = time.perf_counter() - start
            print(
                f"seed {seed}  {method.name:32} {outcome.validation:.4f}  ({seconds:.0f} s)",
                flush=True,
            )
            torch._dynamo.reset()
            RESULTS.mkdir(exist_ok=True)
            content = {"setting": setting, "machine": machine()}
            content |= {"rows": table(results, checkpoints), "losses": results}
            content |= {"checkpoints": checkpoints, "curves": curves}
            if BLOCKS.numbers:
                content |= {"equal blocks": BLOCKS.shares(), "block counts": BLOCKS.numbers}
            path.write_text(json.dumps(content, indent=1) + "\n")
    title = f"{args.steps} steps of {args.batch_size} windows of the standard library's source"
    print(
        f"\n{title}, {args.seeds} seed(s)\n{tabulate(table(results, checkpoints), headers='keys')}"
    )
    if BLOCKS.numbers:
        print(f"\nNVFP4 by the unit, against a scale per call: {BLOCKS.shares()}")
    plot(curves, f"{title}, seed 1", PLOTS / f"{args.name}.png")


if __name__ == "__main__":
    main()
