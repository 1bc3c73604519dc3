"""Descriptions of callbacks: repr, text, notebook."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale import FP8, RematCallback, ScaleMonitor, Simulate, UnitScaleCallback
from lightning_unitscale.callbacks.explanation import Explanation, Table, units_table
from lightning_unitscale.formats import FP16
from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from tests.callbacks.modules import Regression
from tests.callbacks.rule_runs import Classifier, fit
from tests.callbacks.runs import run


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (UnitScaleCallback(), "UnitScaleCallback()"),
        (UnitScaleCallback("u-mup", replace={}), "UnitScaleCallback(method='u-mup', replace={})"),
        (UnitScaleCallback(precision="fp8"), "UnitScaleCallback(precision='fp8')"),
        (
            UnitScaleCallback(remat="min_cut", recalibrate=None),
            "UnitScaleCallback(recalibrate=None, remat='min_cut')",
        ),
        (ScaleMonitor(), "ScaleMonitor()"),
        (
            ScaleMonitor(5, include=["blocks.*"], formats="FP16"),
            "ScaleMonitor(every_n_steps=5, include=['blocks.*'], formats='FP16')",
        ),
        (RematCallback("600MiB"), "RematCallback(budget='600MiB')"),
        (RematCallback(0.5, compile=True), "RematCallback(budget=0.5, compile=True)"),
    ],
)
def test_repr_is_constructor_call(callback: Any, text: str) -> None:
    assert repr(callback) == text


def test_single_format_can_be_a_string() -> None:
    one, several = ScaleMonitor(formats="FP16", every_n_steps=1), ScaleMonitor(1, formats=["FP16"])
    for monitor in (one, several):
        run(Regression, [monitor], max_steps=1)
    formats = [monitor.snapshots[0].layout.formats for monitor in (one, several)]
    assert formats == [(FP16,), (FP16,)]


GAUGE = Gauge(
    {
        "head.linear:input": GaugePair(-1, 0),
        "head.linear:unscaled:weight": GaugePair(3, 0),
        "head.linear": GaugePair(0, -7),
        "bmm": GaugePair(0, 5),
    }
)


def test_units_table_lists_modules() -> None:
    table = units_table(GAUGE)
    assert table is not None
    assert table.headers == ("module", "tensor", "operand units", "gradient")
    assert table.rows == (
        ("head", "linear", "input 2^-1, weight 2^3", "2^-7"),
        ("(the step itself)", "bmm", "", "2^5"),
    )
    assert units_table(Gauge()) is None


def test_notebook_shows_tables_and_escapes_text() -> None:
    explanation = Explanation("a < b", "", Table(("x",), (("<i>",),)))
    assert str(explanation).startswith("a < b\n\nx\n")
    html = explanation._repr_html_()
    assert html.startswith("<pre>a &lt; b</pre>\n<table>")
    assert "&lt;i&gt;" in html and "<i>" not in html


@pytest.mark.parametrize("options", [{}, {"remat": "min_cut"}])
def test_explanation_lists_the_units(options: dict[str, Any]) -> None:
    callback = UnitScaleCallback(**options)
    run(Regression, [callback], max_steps=2)
    table = units_table(callback.gauge)
    assert table is not None and {"first", "second"} <= {row[0] for row in table.rows}
    explanation = callback.explain()
    assert str(explanation).endswith(str(table)) and "input 2^" in explanation
    assert "<td>second" in explanation._repr_html_()


def _warned(callbacks: list[Any], train: Callable[[Any], Any] | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if train is None:
            run(Regression, callbacks, max_steps=2)
        else:
            train(*callbacks)
    return [str(one.message) for one in caught if "Callback: " in str(one.message)] + [
        str(one.message) for one in caught if "ScaleMonitor: " in str(one.message)
    ]


def test_unmatched_globs_warn_once() -> None:
    monitor = ScaleMonitor(1, include=["first.*", "sceond"], exclude="*.bais")
    first, second = _warned([monitor])
    assert first.startswith("ScaleMonitor: include='sceond': matches nothing. ")
    assert "such as 'second'" in first
    assert "exclude='*.bais': matches nothing. " in second
    assert _warned([ScaleMonitor(1, include=["first.*"])]) == []


def test_monitor_without_tensors_warns() -> None:
    (text,) = _warned([ScaleMonitor(1, include=["frist.*"])])
    assert "include='frist.*': matches nothing. " in text and "such as 'first'" in text


def _classify(callback: UnitScaleCallback) -> None:
    fit(Classifier(), callback, max_steps=2)


def test_unmatched_fp8_exclude_warns() -> None:
    fp8 = FP8(exclude=["blocks.0", "*.1.4"])
    outside, text = _warned([UnitScaleCallback(precision=fp8)], _classify)
    assert "run outside FP8: blocks.1.4 (name excluded); " in outside
    assert text.startswith("UnitScaleCallback: FP8: exclude='blocks.0': matches nothing. ")
    assert "such as 'blocks.0.*'" in text
    # The usual names of a readout are no mistake.
    texts = _warned([UnitScaleCallback(precision="fp8")], _classify)
    assert not any("matches nothing" in text for text in texts)


@pytest.mark.parametrize("option", ["precision", "simulate"])
def test_unmatched_exempt_glob_warns(option: str) -> None:
    exempt = [("blocks.0", "forward"), ("blocks.1.*", "forward")]
    options = FP8(exempt=exempt) if option == "precision" else Simulate(exempt=exempt)
    texts = _warned([UnitScaleCallback(**{option: options})], _classify)
    (text,) = [text for text in texts if "matches nothing" in text]
    assert text.startswith("UnitScaleCallback: exempt='blocks.0': matches nothing. ")
    assert "such as 'blocks.0.*'" in text


def _rectify(x: Tensor, approximate: str = "none") -> Tensor:
    return F.relu(x)


@pytest.mark.slow
def test_replaced_function_that_is_not_called_warns() -> None:
    replaced = {F.gelu: _rectify, F.selu: F.relu}
    (text,) = _warned([UnitScaleCallback("u-mup", replace=replaced)], _classify)
    assert text.startswith("UnitScaleCallback: replace={selu: ...}: the step does not call it. ")
    assert "such as " in text
    assert _warned([UnitScaleCallback("u-mup", replace={F.gelu: _rectify})], _classify) == []
