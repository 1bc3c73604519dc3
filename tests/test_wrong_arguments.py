"""Wrong arguments of all public functions: errors name the argument, its value and the way out.

``tests/callbacks/test_combinations.py`` has arguments that are right by themselves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_unitscale
from lightning_unitscale import (
    FP8,
    HFCallback,
    PipelineStrategy,
    RematCallback,
    Rules,
    ScaleMonitor,
    Simulate,
    UnitScaleCallback,
    UnitScaledPrecision,
    attach,
    pipeline,
    precision_report,
    profiler,
    remat,
    transforms,
)
from lightning_unitscale.arguments import shown
from lightning_unitscale.formats import NumberFormat, get_format
from lightning_unitscale.quantize import quantize, rounding_keys

NAN, INF = float("nan"), float("inf")
X = torch.ones(4, 16)
LAYER = nn.Linear(16, 16)
LAYERS = nn.Sequential(LAYER, nn.ReLU(), nn.Linear(16, 16))
# Of numbers a flag is none, nor a tensor, which is compared element by element.
ODD = (b"x", object(), [None], {"a": 1}, torch.ones(2), int)
COUNTS = (0, -1, True, 2.5, NAN, "", "3", [3], *ODD)
NUMBERS = (0, -1.0, NAN, INF, True, "", "3", [3], *ODD)
FLAGS = (None, 0, 1, NAN, "", "yes", [], *ODD)
WORDS = (-1, True, 2.5, "", "nonsense", [], *ODD)
FORMATS = (-1, True, NAN, "", "nonsense", "E9M9", "E1M2", "E4M30", "E5M0", *ODD)
GLOBS = (0, -1, True, False, 3, NAN, "", [""], [3], ("x", None), *ODD)
EXEMPTIONS = (3, "x", ["x"], [("x", "sideways")], [("", "forward")], [(3, "forward")], *ODD)
MODULES = (None, 3, "model", [LAYER], nn.Linear, *ODD[:-1])
FUNCTIONS = (-1, True, "", "nonsense", [], *ODD[:-1])
PATHS = (3, True, [], *ODD)
# An argument is wrong with each of these values.
Wrong = dict[str, tuple[Any, ...]]


def _attach(**arguments: Any) -> None:
    model = nn.Linear(2, 2)
    attach(**{"module": model, "callbacks": [ScaleMonitor()], **arguments})


def _precision_report(**arguments: Any) -> None:
    given = {"module": LAYER, "loss": torch.sum, **arguments}
    precision_report(given.pop("module"), X, **given)


def _profile(**arguments: Any) -> None:
    profiler.profile_graph(arguments.pop("module", LAYER), X, **arguments)


_MULTIPLIERS: Wrong = dict.fromkeys(
    ("residual_mult", "residual_attn_ratio", "attention_mult", "activation_mult", "loss_mult"),
    (None, *NUMBERS),
)
_RULES: Wrong = {
    "replace": (-1, "x", [abs], {1: abs}, {abs: None}, *ODD),
    "residual": (0.5, "x", (0.5,), (0.5, -1.0), (1.0, NAN), *ODD),
    "on_unknown": (None, *WORDS),
}
_CALLBACKS = ("x", ["x"], [ScaleMonitor], ScaleMonitor, [3], *ODD[:4])
# Each function with the arguments that are checked one by one.
WRONG: dict[str, tuple[Callable[..., Any], Wrong]] = {
    "UnitScaleCallback": (
        UnitScaleCallback,
        {
            "method": (None, *WORDS),
            "depth": (None, *WORDS),
            "recalibrate": COUNTS,
            "simulate": (*FORMATS, ["FP16"], ("FP16", 3), ("FP16", "E9M9"), (4, 3, 2)),
            "precision": (*WORDS, "fp4", FP8),
            "remat": (0, -1, True, 1.5, -0.1, NAN, "", "many", "10", "0MiB", *ODD),
            "compile": (None, 0, 1, "yes", *ODD),
            "replace": ({}, *ODD),
            "residual": ((1.0, 1.0), *ODD),
            "lr_scaling": ("", 0, False, "match", *ODD),
            "init_weights": (False, *FLAGS),
            "on_unknown": (None, "keep", *WORDS),
        },
    ),
    "UnitScaleCallback by rules": (
        lambda **arguments: UnitScaleCallback("u-mup", **arguments),
        {**_RULES, "lr_scaling": WORDS, "init_weights": FLAGS},
    ),
    "ScaleMonitor": (
        ScaleMonitor,
        {
            "every_n_steps": (None, *COUNTS),
            "first_step": (None, *COUNTS[1:]),
            "last_step": COUNTS[1:],
            "include": GLOBS,
            "exclude": GLOBS,
            "formats": (None, *FORMATS, ["FP16", 3], ("FP16", "E9M9"), (4, 3)),
            "histograms": (None, 0, 1, "all", *ODD),
            "on_violation": WORDS[:-1],  # a class can be called
            "thresholds": (3, "FP16", [0.1], {"FP17": 0.1}, {"FP16": 1.5}, {"FP16": NAN}, *ODD[:3]),
            "trend_steps": COUNTS,
            "tensorboard_tabs": (None, *WORDS),
        },
    ),
    "RematCallback": (
        lambda **arguments: RematCallback(**{"budget": 0.5, **arguments}),
        {
            "budget": (None, 0, -1, True, 1.5, -0.1, NAN, "", "many", "10", *ODD),
            "compile": (None, 0, "fast", *ODD),
            "offload": WORDS,
        },
    ),
    "Rules": (
        lambda **arguments: Rules(**{"method": "u-mup", **arguments}),
        {"method": (None, "lossless", *WORDS), **_MULTIPLIERS},
    ),
    "FP8": (
        FP8,
        {
            "exclude": GLOBS,
            "gradient_format": (None, "FP16", *WORDS),
            "evaluation": FLAGS,
            "grid": (None, *WORDS),
            "on_misfit": (None, *WORDS),
            "exempt": EXEMPTIONS,
            "max_damage": (-0.1, 1.5, True, NAN, "", "3", [3], *ODD),
            "measured_from": COUNTS,
        },
    ),
    "UnitScaledPrecision": (
        UnitScaledPrecision,
        {
            "precision": (*WORDS, "fp4", FP8),
            "simulate": (*FORMATS, ["FP16"], ("FP16", 3), ("FP16", "E9M9"), (4, 3, 2)),
            "recalibrate": COUNTS,
            "base": (None, *WORDS),
        },
    ),
    "precision_report": (
        _precision_report,
        {
            "module": MODULES,
            "formats": (("nonsense",), (3,), ("E9M9",)),
            "exempt": EXEMPTIONS,
            "directions": COUNTS,
            "pairs": COUNTS,
            "method": (),
            "loss": (),
            "context": (),
            "batch": (),
            "kwargs": (),
        },
    ),
    "Simulate": (
        Simulate,
        {
            "format": (None, *FORMATS, ["FP16"], ("FP16", 3)),
            "rounding": (None, *WORDS),
            "grid": (None, *WORDS),
            "forward": FORMATS,
            "backward": FORMATS,
            "gradient_rounding": WORDS,
            "square_weights": (*FLAGS, True),
            "hadamard": (*FLAGS, True),
            "exempt": EXEMPTIONS,
        },
    ),
    "HFCallback": (
        lambda **arguments: HFCallback(**{"callbacks": ScaleMonitor(), **arguments}),
        {"callbacks": (None, 3, (), *_CALLBACKS), "log_dir": PATHS},
    ),
    "attach": (
        _attach,
        {
            "module": MODULES,
            "optimizer": (3, "sgd", [None], *ODD),
            "callbacks": (None, 3, *_CALLBACKS),
            "methods": (None, 3, "", "nonsense", [3], *ODD),
            "log_dir": ("", str(Path(__file__) / "scales"), __file__, "\0", *PATHS),
            "loggers": (None, 3, "runs", [3], *ODD),
            "scaler": (3, True, "dynamic", *ODD),
        },
    ),
    "PipelineStrategy": (
        lambda **arguments: PipelineStrategy(**{"num_microbatches": 2, **arguments}),
        {
            "schedule": (None, *WORDS),
            "num_microbatches": (None, *COUNTS),
            "data_parallel": (None, *COUNTS),
            "stages_per_rank": (None, *COUNTS),
            "split": (None, 3, "layers", [1], *ODD[:3], ODD[4]),
            "capture": (None, *WORDS),
            "free_unowned": FLAGS,
            "evaluation": (None, *WORDS),
            "num_eval_microbatches": (None, *COUNTS),
            "check_batches": (None, -1, True, NAN, "3", *ODD),
            "process_group_backend": (3, True, *ODD),
            "timeout": (None, *NUMBERS),
        },
    ),
    "quantize": (
        lambda **arguments: quantize(**{"tensor": X, "format": "FP16", **arguments}),
        {
            "tensor": (None, 3, 2.5, "x", [1.0], *ODD[:4]),
            "format": (None, *FORMATS, (4, 3, 2), (4.0, 3)),
            "rounding": (None, *WORDS),
            "generator": (3, "x", *ODD),
            "saturate": FLAGS[1:],
        },
    ),
    "quantize at random": (
        lambda **arguments: quantize(X, "FP16", "stochastic", **arguments),
        {"generator": (3, "x", *ODD[:4])},
    ),
    "rounding_keys": (
        lambda **arguments: rounding_keys(**{"count": 1, **arguments}),
        {"count": (None, -1, True, NAN, "3", *ODD), "generator": (3, "x", *ODD)},
    ),
    "get_format": (get_format, {"format": (None, *FORMATS, (4, 3, 2), (True, 3))}),
    "NumberFormat": (
        lambda **arguments: NumberFormat(
            **{"name": "E3M4", "exponent_bits": 3, "mantissa_bits": 4, **arguments}
        ),
        {
            "name": (None, 3, "", *ODD),
            "exponent_bits": (None, 1, 9, 3.0, *COUNTS),
            "mantissa_bits": (None, 25, 3.0, *COUNTS),
            "finite_only": FLAGS,
        },
    ),
    "lossless_unit_scale": (
        lambda module=LAYER, **arguments: transforms.lossless_unit_scale(module, X, **arguments),
        {"module": MODULES, "depth": (None, *WORDS)},
    ),
    "simulate_format": (
        lambda **arguments: transforms.simulate_format(
            **{"module": LAYER, "operand_format": "FP16", "gradient_format": "FP16", **arguments}
        ),
        {
            "module": MODULES,
            "operand_format": FORMATS,
            "gradient_format": FORMATS,
            "rounding": (None, *WORDS),
            "gradient_rounding": WORDS,
            "square_weights": (*FLAGS, True),
            "hadamard": (*FLAGS, True),
            "saturate": FLAGS[1:],
            "include": GLOBS,
            "exclude": GLOBS,
            "seed": (None, -1, True, 2.5, "x", *ODD),
            "grid": (None, *WORDS),
        },
    ),
    "simulate_fp8": (transforms.simulate_fp8, {"module": MODULES}),
    "fp8_linears": (
        lambda **arguments: transforms.fp8_linears(**{"module": LAYER, **arguments}),
        {
            "module": MODULES,
            "scaling": (None, *WORDS),
            "exclude": GLOBS,
            "gradient_format": (None, *WORDS),
            "grid": (None, *WORDS),
        },
    ),
    "compile": (
        lambda **arguments: transforms.compile(**{"module": LAYER, **arguments}),
        {"module": MODULES, "mode": (None, *WORDS)},
    ),
    "unit_scale": (
        lambda **arguments: transforms.unit_scale(**{"module": LAYER, **arguments}),
        {"module": MODULES, **_RULES, "init_weights": FLAGS, **_MULTIPLIERS},
    ),
    "track_scales": (transforms.track_scales, {"module": MODULES}),
    "deploy": (
        lambda **arguments: transforms.deploy(**{"module": LAYER, **arguments}),
        {"module": MODULES, "fold": FLAGS},
    ),
    "remat": (
        lambda **arguments: remat.remat(**{"module": LAYER, "budget": 0.5, **arguments}),
        {"module": MODULES, "budget": (None, 0, True, 1.5, NAN, "", "many", *ODD)},
    ),
    "plan_remat": (
        lambda function=LAYER, **arguments: remat.plan_remat(
            function, X, **{"budget": 0.5, **arguments}
        ),
        {
            "function": (None, *FUNCTIONS),
            "budget": (None, 0, True, 1.5, NAN, "", "many", *ODD),
            "cost_model": (3, "x", *ODD),
            "resident_bytes": (None, -1, True, NAN, "3", *ODD),
        },
    ),
    "pareto_front": (
        lambda function=LAYER, **arguments: remat.pareto_front(function, X, **arguments),
        {
            "function": (None, *FUNCTIONS),
            "num_plans": (None, *COUNTS),
            "path": (str(Path(__file__) / "front.png"), str(Path(__file__).parent), *PATHS),
        },
    ),
    "profile_graph": (
        _profile,
        {
            "module": MODULES,
            "device": (None, "cpu:0", *WORDS),
            "optimizer": FUNCTIONS,
            "method": (None, "nonsense", 3, "", *ODD),
            "loss": FUNCTIONS,
            "context": (None, *FUNCTIONS),
        },
    ),
    "pipeline": (
        lambda **arguments: pipeline.pipeline(**{"module": LAYERS, "mb_args": X, **arguments}),
        {
            "module": MODULES,
            "mb_args": (None, 3, "x", *ODD[:2]),
            "mb_kwargs": (3, "x", [1], *ODD[:3]),
            "split_spec": (3, "x", [1], {"3": pipeline.SplitPoint.END}, *ODD[:3]),
            "split_policy": FUNCTIONS,
        },
    ),
    "balanced_split": (
        lambda **arguments: pipeline.balanced_split(**{"num_stages": 2, **arguments}),
        {
            "num_stages": (None, *COUNTS),
            "bytes_per_second": NUMBERS,
            "rank_of": FUNCTIONS,
            "num_microbatches": COUNTS,
        },
    ),
    "explain_pipeline": (
        lambda **arguments: pipeline.explain_pipeline(
            **{"module": LAYERS, "batch": X, "num_stages": 2, **arguments}
        ),
        {
            "module": MODULES,
            "num_stages": (None, 100, *COUNTS),
            "num_microbatches": COUNTS,
        },
    ),
}
CASES = [
    (function, argument) for function, (_, arguments) in WRONG.items() for argument in arguments
]


@pytest.mark.parametrize(("function", "argument"), CASES, ids=map(" ".join, CASES))
def test_error_has_argument_and_value(function: str, argument: str) -> None:
    call, arguments = WRONG[function]
    for value in arguments[argument]:
        with pytest.raises((ValueError, TypeError)) as raised:
            call(**{argument: value})
            pytest.fail(f"{argument}={shown(value)} is taken")
        text = " ".join(str(raised.value).split())
        assert re.search(rf"^{argument}\W.*: .*Expected .+\. .+", text), text
        # One wrong value of several may be named alone, and a class by its name.
        values = value if isinstance(value, (list, tuple)) and value else (value,)
        names = [shown(one)[:60] for one in (value, *values)]
        names += [one.__name__ for one in values if isinstance(one, type)]
        assert any(f"{argument}={name}" in text for name in (*names, "()")), text
        assert len(text) < 500


def test_every_public_argument_is_tested() -> None:
    checked = {name: set(arguments) for name, (_, arguments) in WRONG.items()}
    for name in lightning_unitscale._EXPORTS:
        parameters = inspect.signature(getattr(lightning_unitscale, name)).parameters
        assert set(parameters) <= checked[name], name


def test_long_value_is_truncated() -> None:
    with pytest.raises(ValueError, match="depth=") as raised:
        UnitScaleCallback(depth=list(range(1000)))  # type: ignore[arg-type]
    assert len(str(raised.value)) < 300
