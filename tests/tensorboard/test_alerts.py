"""Alerts in event files: written, read, served, and kept when samples are thinned."""

import json

import pytest
from torch.utils.tensorboard import SummaryWriter
from werkzeug.test import Client

from lightning_unitscale.scales.violations import (
    first_nonfinite,
    format_violations,
    parse_thresholds,
)
from lightning_unitscale.tensorboard.history import read_run
from lightning_unitscale.tensorboard.writer import ScaleWriter
from tests.tensorboard.runs import snapshot, with_nan, write
from tests.tensorboard.test_plugin import get, wsgi_app


@pytest.fixture
def logdir(tmp_path):
    with SummaryWriter(str(tmp_path / "logs/bad")) as experiment:
        writer = ScaleWriter(experiment)
        for step in (0, 10, 20):
            one = snapshot(step) if step < 20 else with_nan(snapshot(step), 2)
            writer.write(one)
            if (alert := first_nonfinite(one)) is not None:
                limits = parse_thresholds({"E4M3FN": {"flushed": 0.01}})
                writer.write_alerts([alert, *format_violations(one, limits)], step)
    write(tmp_path / "logs/good", [snapshot(0)])
    return tmp_path / "logs"


def test_alerts_are_read_from_event_file(logdir):
    alerts = read_run(logdir / "bad").alerts()
    assert len(alerts) > 1
    assert (alerts[0].kind, alerts[0].step, alerts[0].tensor) == (
        "nonfinite",
        20,
        "blocks.0.mlp.gelu",
    )
    assert {one.kind for one in alerts[1:]} == {"flushed"}
    assert read_run(logdir / "good").alerts() == ()


def test_alerts_route_returns_alerts_of_run(logdir):
    client = Client(wsgi_app(logdir))
    found = json.loads(get(client, "alerts", run="bad").data)
    expected = read_run(logdir / "bad").alerts()
    assert [one["text"] for one in found] == [str(one) for one in expected]
    assert {key: found[0][key] for key in ("kind", "step", "tensor", "direction")} == {
        "kind": "nonfinite",
        "step": 20,
        "tensor": "blocks.0.mlp.gelu",
        "direction": "forward",
    }
    assert json.loads(get(client, "alerts", run="good").data) == []
    get(client, "alerts", 404, run="nothing")
