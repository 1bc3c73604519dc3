"""The options of ``UnitScaleCallback``: strings for the common case, dataclasses for the rest."""

import dataclasses
import inspect
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_unitscale import FP8, Rules, ScaleMonitor, Simulate, UnitScaleCallback
from lightning_unitscale.formats import get_format


def test_signature_has_at_most_twelve_options() -> None:
    names = list(inspect.signature(UnitScaleCallback).parameters)
    assert len(names) <= 12
    assert names[:2] == ["method", "depth"]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (UnitScaleCallback().method, "lossless"),
        (UnitScaleCallback("unit-scaling").method, Rules("unit-scaling")),
        (UnitScaleCallback("u-mup").method, Rules("u-mup")),
        (UnitScaleCallback(precision="fp8").precision, FP8()),
        (UnitScaleCallback(simulate="fp8").simulate, Simulate()),
        (UnitScaleCallback(simulate="E3M2FN").simulate, Simulate("E3M2FN")),
        (UnitScaleCallback().precision, None),
        (UnitScaleCallback().simulate, None),
    ],
)
def test_string_is_option_with_defaults(option: Any, expected: Any) -> None:
    assert option == expected


@pytest.mark.parametrize("option", [Rules("u-mup"), FP8(), Simulate()])
def test_options_are_frozen(option: Any) -> None:
    field = dataclasses.fields(option)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(option, field, None)


def test_formats_by_name_description_and_pair() -> None:
    assert Simulate().formats == ("E4M3FN", "E5M2")
    assert Simulate("BF16").formats == ("BF16", "BF16")
    assert Simulate((get_format("E4M3FN"), "E3M2FN")).formats == (get_format("E4M3FN"), "E3M2FN")


@pytest.mark.parametrize("name", ["fp8_exclude", "simulate_rounding", "gird"])
def test_unknown_keyword_is_an_error(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        UnitScaleCallback(**{name: "auto"})


_MONITOR_SETTINGS: list[tuple[dict[str, Any], Any]] = [
    ({"on_violation": "stop"}, "stop"),
    ({"on_violation": "builtins.print"}, print),
    ({"last_step": 200}, 200),
    ({"first_step": 10}, 10),
]


@pytest.mark.parametrize(("settings", "expected"), _MONITOR_SETTINGS)
def test_monitor_survives_yaml_round_trip(settings: dict[str, Any], expected: Any) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[pl.Callback])
    monitor = {"class_path": "lightning_unitscale.ScaleMonitor", "init_args": settings}
    config = parser.parse_object({"callbacks": [monitor]})
    printed = parser.parse_string(parser.dump(config))
    (name,) = settings
    default = inspect.signature(ScaleMonitor).parameters[name].default
    for parsed in (config, printed):
        (callback,) = parser.instantiate(parsed).callbacks
        assert expected != default
        assert callback._arguments[name] == expected


_SETTINGS: list[tuple[dict[str, Any], Any]] = [
    ({"method": "u-mup"}, Rules("u-mup")),
    (
        {"method": {"class_path": "Rules", "init_args": {"method": "u-mup", "loss_mult": 2.0}}},
        Rules("u-mup", loss_mult=2.0),
    ),
    (
        {"precision": {"class_path": "FP8", "init_args": {"exclude": ["head"], "grid": "fixed"}}},
        FP8(exclude=["head"], grid="fixed"),
    ),
    (
        {"simulate": {"class_path": "Simulate", "init_args": {"rounding": "stochastic"}}},
        Simulate(rounding="stochastic"),
    ),
    (
        {"simulate": {"class_path": "Simulate", "init_args": {"format": ["E4M3FN", "E3M2FN"]}}},
        Simulate(("E4M3FN", "E3M2FN")),
    ),
    ({"compile": True}, True),
    ({"compile": "reduce-overhead"}, "reduce-overhead"),
]


@pytest.mark.parametrize(("settings", "expected"), _SETTINGS)
def test_options_survive_yaml_round_trip(settings: dict[str, Any], expected: Any) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    for value in settings.values():
        if isinstance(value, dict):
            value["class_path"] = "lightning_unitscale." + value["class_path"].rpartition(".")[2]
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[pl.Callback])
    scaled = {"class_path": "lightning_unitscale.UnitScaleCallback", "init_args": settings}
    config = parser.parse_object({"callbacks": [scaled]})
    printed = parser.parse_string(parser.dump(config))
    for parsed in (config, printed):
        (callback,) = parser.instantiate(parsed).callbacks
        assert getattr(callback, next(iter(settings))) == expected
