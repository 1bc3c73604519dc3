"""The plugin's routes, through TensorBoard's own application on real event files."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend import application
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.plugins import base_plugin
from torch.utils.tensorboard import SummaryWriter
from werkzeug.test import Client

from lightning_unitscale.scales.violations import first_nonfinite
from lightning_unitscale.tensorboard import plugin as plugin_module
from lightning_unitscale.tensorboard.history import kept_steps, merge_orders, read_run
from lightning_unitscale.tensorboard.plugin import SAMPLES, STATIC_FILES, ScalesLoader
from lightning_unitscale.tensorboard.responses import SHOWN_FORMATS
from lightning_unitscale.tensorboard.writer import ScaleWriter
from tests.tensorboard.runs import LAYOUT, NAMES, snapshot, unit_scaled, with_nan, write

PREFIX = "/data/plugin/scales"
STATIC = Path(plugin_module.__file__).parent / "static"


def parse_frame(data):
    """The header and the arrays of a frame."""
    length = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + length])
    values = np.frombuffer(data, "<f4", offset=4 + length)
    arrays, start = {}, 0
    for item in header.pop("arrays"):
        stop = start + int(np.prod(item["shape"]))
        arrays[item["name"]] = values[start:stop].reshape(item["shape"])
        start = stop
    return header, arrays


def wsgi_app(logdir: Path) -> application.TensorBoardWSGI:
    """TensorBoard on a log folder, with this plugin alone."""
    flags = argparse.Namespace(samples_per_plugin={})
    loader = ScalesLoader()
    loader.fix_flags(flags)
    multiplexer = plugin_event_multiplexer.EventMultiplexer(
        tensor_size_guidance=flags.samples_per_plugin
    )
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(logdir))
    context = base_plugin.TBContext(
        logdir=str(logdir), multiplexer=multiplexer, data_provider=provider
    )
    return application.TensorBoardWSGI([loader.load(context)], data_provider=provider)


@pytest.fixture
def logdir(tmp_path):
    meant = [snapshot(step) for step in (0, 10, 20)]
    write(tmp_path / "logs/baseline", meant)
    write(tmp_path / "logs/scaled", [unit_scaled(one) for one in meant])
    return tmp_path / "logs"


@pytest.fixture
def client(logdir):
    return Client(wsgi_app(logdir))


def get(client, route, status=200, **query):
    response = client.get(f"{PREFIX}/{route}", query_string=query)
    assert response.status_code == status, response.text
    return response


def frame(client, route, **query):
    response = get(client, route, **query)
    assert response.content_type == "application/octet-stream"
    return parse_frame(response.data)


def test_runs_route(client):
    answer = json.loads(get(client, "runs").data)
    assert [(one["name"], one["last_steps"]) for one in answer["runs"]] == [
        ("baseline", {"forward": 20, "backward": 20}),
        ("scaled", {"forward": 20, "backward": 20}),
    ]
    assert all(one["started"] > 1.6e9 for one in answer["runs"])
    assert [one["name"] for one in answer["formats"]] == [item.name for item in SHOWN_FORMATS]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_scales_route(client, direction):
    header, arrays = frame(client, "scales", run="scaled", direction=direction)
    assert tuple(header["names"]) == NAMES
    assert header["modules"][0] == "blocks.0.attn"
    assert header["steps"] == [0, 10, 20]
    for row, step in enumerate(header["steps"]):
        expected = unit_scaled(snapshot(step))
        stored = expected.log2_rms(direction, stored=True).astype(np.float32)
        np.testing.assert_array_equal(arrays["log2_rms"][row], stored)
        units = arrays["log2_unit"][header["unit_rows"][row]]
        np.testing.assert_array_equal(units, expected.log2_divisors(direction))


def test_nan_and_infinities_are_counted(tmp_path):
    steps = [snapshot(0), with_nan(snapshot(10), 1, 3), snapshot(20)]
    write(tmp_path / "logs/run", steps)
    client = Client(wsgi_app(tmp_path / "logs"))
    header, arrays = frame(client, "scales", run="run", direction="backward")
    assert header["nonfinite_rows"] == [1]
    assert arrays["nonfinite"].tolist() == [[0, 3, 0, 3, 0, 0]]


def test_step_with_only_nan_is_written(tmp_path):
    write(tmp_path, [with_nan(snapshot(0), *range(len(NAMES)))])
    history = read_run(tmp_path).history("backward")
    assert (history.nonfinite == 3).all()


def test_unchanged_units_are_sent_once(client):
    header, arrays = frame(client, "scales", run="baseline", direction="forward")
    assert header["unit_rows"] == [0, 0, 0]
    np.testing.assert_array_equal(arrays["log2_unit"], np.zeros((1, len(NAMES))))


def test_exponents_route(client):
    query = {"run": "scaled", "direction": "forward", "tensor": NAMES[2]}
    header, arrays = frame(client, "exponents", **query)
    assert header["steps"] == [0, 10, 20]
    assert header["num_sampled"] == [400] * 3
    first = header["first_exponent"] + 150
    for row, step in enumerate(header["steps"]):
        expected = unit_scaled(snapshot(step))
        counts = expected.exponent_counts()[2]
        assert header["log2_unit"][row] == expected.log2_sigma[2]
        np.testing.assert_array_equal(
            arrays["counts"][row], counts[first : first + arrays["counts"].shape[1]]
        )
        assert arrays["counts"][row].sum() == counts.sum() == 400


def test_zero_tensor_has_no_exponents(client):
    query = {"run": "baseline", "direction": "backward", "tensor": NAMES[-1]}
    header, arrays = frame(client, "exponents", **query)
    assert header["num_sampled"] == [8] * 3
    assert arrays["counts"].shape == (3, 0)


@pytest.mark.parametrize("run", ["baseline", "scaled"])
def test_fractions_route(client, run):
    for place in (0, 4):  # the second answer comes from what the first has read
        query = {"run": run, "direction": "backward", "tensor": NAMES[place]}
        header, arrays = frame(client, "fractions", **query)
        assert header["formats"] == [item.name for item in LAYOUT.formats]
        expected = snapshot(20) if run == "baseline" else unit_scaled(snapshot(20))
        exact = expected.fractions("backward")[place].astype(np.float16)
        np.testing.assert_array_equal(arrays["fractions"][-1], exact)


def test_missing_runs_and_tensors_are_http_errors(client):
    get(client, "scales", status=404, run="nowhere", direction="forward")
    assert "Expected one of forward" in get(client, "scales", status=400, run="scaled").text
    query = {"run": "scaled", "direction": "forward", "tensor": "nowhere"}
    get(client, "exponents", status=404, **query)
    get(client, "fractions", status=404, **query)


def test_source_tensors_are_marked(tmp_path):
    inputs = ((), (NAMES[0],), (NAMES[1],), (), (NAMES[3],), (NAMES[4],))
    write(tmp_path / "logs/run", [replace(snapshot(0), inputs=inputs)])
    write(tmp_path / "logs/silent", [snapshot(0)])
    client = Client(wsgi_app(tmp_path / "logs"))
    header, _ = frame(client, "scales", run="run", direction="backward")
    assert header["sources"] == [not group for group in inputs]
    header, _ = frame(client, "scales", run="silent", direction="forward")
    assert not any(header["sources"])


def test_late_alert_of_last_step_changes_version(tmp_path):
    def version():
        answer = json.loads(get(Client(wsgi_app(tmp_path)), "runs").data)
        return answer["runs"][0]["version"], answer["runs"][0]["last_steps"]["forward"]

    with SummaryWriter(str(tmp_path / "run")) as experiment:
        writer = ScaleWriter(experiment)
        seen = []
        for step in (0, 10):
            one = with_nan(snapshot(step), 2)
            writer.write(one)
            experiment.flush()
            seen.append(version())
            writer.write_alerts([first_nonfinite(one)], step)
            experiment.flush()
            seen.append(version())
    assert [step for _, step in seen] == [0, 0, 10, 10]
    assert len({number for number, _ in seen}) == 4


def test_divergence_of_two_runs_route(tmp_path):
    write(tmp_path / "logs/a", [snapshot(step) for step in (0, 1)])
    write(tmp_path / "logs/b", [snapshot(0), snapshot(1, offset=3)])
    client = Client(wsgi_app(tmp_path / "logs"))
    found = json.loads(get(client, "divergence", run="a", compared="b").data)
    assert (found["step"], found["tensor"], found["direction"]) == (1, NAMES[0], "forward")
    assert found["text"].startswith("The runs diverge at step 1, forward: ")
    found = json.loads(get(client, "divergence", run="a", compared="a").data)
    assert found["diverged"] is False
    write(tmp_path / "logs/c", [snapshot(0, names=("x", "y"))])
    client = Client(wsgi_app(tmp_path / "logs"))
    found = json.loads(get(client, "divergence", run="a", compared="c").data)
    assert found["diverged"] is False and "share no tensor" in found["text"]


def test_tensor_sets_are_merged(tmp_path):
    names = (*NAMES[:2], "new", *NAMES[3:])
    steps = [snapshot(0), snapshot(10, names=names), snapshot(20, backward=False)]
    write(tmp_path / "logs/run", steps)
    client = Client(wsgi_app(tmp_path / "logs"))
    header, arrays = frame(client, "scales", run="run", direction="forward")
    assert header["names"] == [*NAMES[:2], "new", *NAMES[2:]]
    present = ~np.isnan(arrays["log2_rms"])
    assert present[:, 2].tolist() == [False, True, False]
    assert present[:, 3].tolist() == [True, False, True]
    assert present[:, 4].all()
    header, arrays = frame(client, "scales", run="run", direction="backward")
    assert header["steps"] == [0, 10]
    query = {"run": "run", "direction": "forward", "tensor": "new"}
    _, arrays = frame(client, "fractions", **query)
    assert np.isnan(arrays["fractions"][[0, 2]]).all()
    assert not np.isnan(arrays["fractions"][1]).any()


def test_run_without_gradients(tmp_path):
    write(tmp_path / "logs/run", [snapshot(0, backward=False)])
    client = Client(wsgi_app(tmp_path / "logs"))
    (run,) = json.loads(get(client, "runs").data)["runs"]
    assert run["last_steps"] == {"forward": 0}
    header, arrays = frame(client, "scales", run="run", direction="backward")
    assert header["steps"] == []
    assert arrays["log2_rms"].shape == (0, len(NAMES))


def test_listed_as_active_only_with_scales(client, tmp_path):
    def is_enabled(one):
        return one.get("/data/plugins_listing").json["scales"]["enabled"]

    assert is_enabled(client)
    (tmp_path / "empty").mkdir()
    empty = Client(wsgi_app(tmp_path / "empty"))
    assert not is_enabled(empty)
    assert json.loads(get(empty, "runs").data)["runs"] == []


def test_only_static_files_are_served(client):
    assert {"index.js", "app.js", "style.css"} <= set(STATIC_FILES)
    for name in STATIC_FILES:
        assert get(client, f"static/{name}").data == (STATIC / name).read_bytes()
    for name in ("../plugin.py", "%2e%2e/plugin.py", "nothing.js"):
        get(client, f"static/{name}", status=404)


def test_page_loads_no_external_resources():
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "//cdn" not in text, path.name


def test_samples_per_plugin_default_is_raised():
    for given, expected in (({}, SAMPLES), ({"scales": 7}, 7)):
        flags = argparse.Namespace(samples_per_plugin=dict(given))
        ScalesLoader().fix_flags(flags)
        assert flags.samples_per_plugin["scales"] == expected == flags.samples_per_plugin["scales"]


def test_plugin_is_a_tensorboard_entry_point():
    found = [one for one in entry_points(group="tensorboard_plugins") if one.name == "scales"]
    if not found:
        pytest.skip("the package is not installed here: entry points belong to installed packages")
    assert all(one.load() is ScalesLoader for one in found)


def test_plugin_does_not_import_torch():
    code = (
        "import sys; import lightning_unitscale.tensorboard.plugin; "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True
    )
    assert not set(done.stdout.split()) & {"torch", "lightning", "scipy", "matplotlib"}


def test_event_files_are_read_without_tensorboard(logdir):
    run = read_run(logdir / "scaled")
    assert run.directions == ("forward", "backward")
    history = run.history("backward")
    expected = unit_scaled(snapshot(10))
    np.testing.assert_allclose(
        history.values(stored=False)[1], expected.log2_rms("backward"), rtol=1e-6
    )
    counts = run.exponents("forward", NAMES[0])[20].counts
    np.testing.assert_array_equal(counts, unit_scaled(snapshot(20)).exponent_counts()[0])


def test_rewritten_step_has_later_value(tmp_path):
    write(tmp_path, [snapshot(0), snapshot(10)])
    write(tmp_path, [snapshot(10, offset=3), snapshot(20)])
    history = read_run(tmp_path).history("forward")
    assert history.steps.tolist() == [0, 10, 20]
    np.testing.assert_allclose(history.log2_rms[1], snapshot(10, offset=3).log2_rms(), rtol=1e-6)


@pytest.mark.parametrize(
    ("orders", "merged"),
    [
        ([], ""),
        (["abc"], "abc"),
        (["abc", "abc"], "abc"),
        (["ac", "abc"], "abc"),
        (["bc", "abd"], "abdc"),
        (["ab", "cd"], "cdab"),
        (["abc", "cba"], "abc"),
    ],
)
def test_merge_orders_of_tensor_names(orders, merged):
    assert "".join(merge_orders(tuple(one) for one in orders)) == merged


def test_thinning_keeps_last_step():
    assert kept_steps(10, 4).tolist() == [0, 3, 6, 9]
    assert kept_steps(3, 10).tolist() == [0, 1, 2]
    assert kept_steps(7, 1).tolist() == [6]
