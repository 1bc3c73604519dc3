"""The report of a run without TensorBoard, and the command that makes it."""

import html
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread
from torch.utils.tensorboard import SummaryWriter

from lightning_unitscale.cli import main
from lightning_unitscale.scales.violations import format_violations, parse_thresholds
from lightning_unitscale.tensorboard.history import LastStep, read_run
from lightning_unitscale.tensorboard.report_page import STATIC, bundle
from lightning_unitscale.tensorboard.run_report import FLAG, write_report
from lightning_unitscale.tensorboard.table import scale_table
from lightning_unitscale.tensorboard.writer import ScaleWriter
from tests.tensorboard.runs import NAMES, snapshot, unit_scaled, write


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "logs/gpt/version_0", [unit_scaled(snapshot(s)) for s in (0, 10)])


def test_command_writes_a_picture_a_page_and_the_table(run, tmp_path, capsys):
    main(["report", str(run), "--output", "out"])
    printed = capsys.readouterr().out
    assert "Scales at step 10" in printed
    assert all(name.rpartition(".")[2] in printed for name in NAMES)
    assert "out/scales.png" in printed and "out/scales.html" in printed
    picture = imread(tmp_path / "out/scales.png")
    assert min(picture.shape[:2]) > 400
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50
    page = (tmp_path / "out/scales.html").read_text()
    assert "gpt/version_0" in page
    assert "default-src 'none'" in page
    for foreign in ("src=", "href=", "@import", "url("):
        assert foreign not in page


def test_damaged_event_files_are_reported_and_files_still_written_are_not(run):
    (path,) = run.glob("*tfevents*")
    content = path.read_bytes()
    path.write_bytes(content[:-9])  # the last record, alerts or statistics, is incomplete
    assert len(read_run(run).history("forward").steps)
    damaged = bytearray(content)
    damaged[-40] ^= 255
    path.write_bytes(damaged)
    with pytest.warns(UserWarning, match=rf"{path.name} is damaged, and what follows .* Copy it"):
        read_run(run)
    damaged[40] ^= 255
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"^RUN='.*': the event file .* is damaged"):
        read_run(run, "RUN")


def test_home_folder_is_not_made_as_a_folder_of_that_name(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    main(["report", str(run), "--output=~/out"])
    assert (tmp_path / "home/out/scales.html").is_file() and not (tmp_path / "~").exists()


def test_report_without_matplotlib_has_page_and_table(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    main(["report", str(run), "--output", "out"])
    printed = capsys.readouterr()
    assert "Scales at step 10" in printed.out and "out/scales.html" in printed.out
    assert "scales.png" not in printed.out
    assert "No picture: matplotlib not found; " in printed.err
    assert "pip install 'lightning-unitscale[report]'" in printed.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["scales.html"]


def test_table_matches_snapshot(run):
    printed = scale_table(LastStep(read_run(run)))
    # The event file has fractions in half precision: three digits of them are shown.
    fields = [line.split() for line in printed.splitlines()]
    expected = [line.split() for line in scale_table(unit_scaled(snapshot(10))).splitlines()]
    assert [line[:6] for line in fields] == [line[:6] for line in expected]


def test_run_without_gradients(tmp_path, capsys):
    write(tmp_path / "run", [snapshot(0, backward=False)])
    main(["report", "run"])
    assert "Scales at step 0" in capsys.readouterr().out
    assert (tmp_path / "scale_report/scales.html").exists()


@pytest.mark.slow
def test_page_has_graph_of_last_step(tmp_path):
    inputs = ((), (NAMES[0],), (NAMES[1],), (NAMES[1], NAMES[2]), (NAMES[3],), (NAMES[4],))
    last = replace(unit_scaled(snapshot(10)), inputs=inputs)
    report = write_report([write(tmp_path / "run", [last])], tmp_path / "out")
    page = report.page.read_text()
    picture = page[page.index('<svg class="step-graph"') : page.index("</svg>")]
    places = {name: place for place, name in enumerate(NAMES)}
    arcs = [(int(a), int(b)) for a, b in re.findall(r'data-from="(\d+)" data-to="(\d+)"', picture)]
    expected = [(places[one], row) for row, group in enumerate(inputs) for one in group]
    assert arcs == expected
    texts = re.findall(r">([^<]+)</text>", picture)
    assert texts[:2] == ["forward", "backward"]
    values = [
        f"{round(value, 1) + 0.0:.1f}".replace("-", "\N{MINUS SIGN}")
        for value in last.log2_rms("forward", stored=True)
    ]
    assert texts[2::3] == values and texts[4::3] == list(NAMES)
    assert texts[-2] == "zero"  # the last gradient


@pytest.mark.slow
def test_new_report_removes_pictures_of_old_one(run, tmp_path):
    output = tmp_path / "out"
    mine = output / "scales_of_mine.png"
    output.mkdir()
    mine.touch()
    for runs, pictures in (
        ([run], ["scales.png"]),
        ([run, other_run(tmp_path)], TWO),
        ([run], ONE),
    ):
        report = write_report(runs, output)
        assert [path.name for path in report.pictures] == pictures
        assert sorted(path.name for path in output.glob("*.png")) == sorted([*pictures, mine.name])


ONE, TWO = ["scales.png"], ["scales_1.png", "scales_2.png"]


def other_run(tmp_path):
    return write(tmp_path / "logs/base/version_3", [snapshot(0)])


@pytest.mark.slow
def test_pictures_without_units_have_one_map_per_direction(run, tmp_path):
    both = imread(write_report([run], tmp_path / "units").pictures[0])
    one = imread(write_report([other_run(tmp_path)], tmp_path / "none").pictures[0])
    assert one.shape[1] < 0.7 * both.shape[1]


@pytest.mark.slow
def test_report_has_alerts(tmp_path):
    folder = tmp_path / "run"
    inputs = ((), (NAMES[0],), (NAMES[1],), (NAMES[2],), (NAMES[3],), (NAMES[4],))
    with SummaryWriter(str(folder)) as experiment:
        writer = ScaleWriter(experiment)
        for step in (0, 10):
            one = replace(snapshot(step), inputs=inputs)
            writer.write(one)
        limits = parse_thresholds({"E4M3FN": {"flushed": 0.01}})
        alerts = format_violations(one, limits)
        writer.write_alerts(alerts, 10)
    assert alerts
    alerts = read_run(folder).alerts()
    report = write_report([folder], tmp_path / "out")
    page = report.page.read_text()
    # In the list below the map, whose lines break, and not in the table's, which do not.
    items = re.findall(r"<li>(.*)</li>", page)
    assert items == [html.escape(str(one)) for one in alerts]
    assert str(alerts[0]) not in re.search(r"<pre>(.*?)</pre>", page, re.DOTALL)[1]
    assert str(alerts[0]) in report.tables[next(iter(report.tables))]
    assert count_pixels(report.pictures[0], FLAG) > 20
    plain = write_report([write(tmp_path / "plain", [snapshot(0)])], tmp_path / "other")
    assert count_pixels(plain.pictures[0], FLAG) == 0


def count_pixels(picture, color):
    pixels = np.round(255 * imread(picture)[..., :3]).astype(int).reshape(-1, 3)
    return int((pixels == [int(color[k : k + 2], 16) for k in (1, 3, 5)]).all(axis=1).sum())


@pytest.mark.slow
def test_run_names_match_tensorboard(run, tmp_path):
    other = write(tmp_path / "logs/base/version_3", [snapshot(0)])
    report = write_report([run, other], tmp_path / "out")
    assert list(report.tables) == ["gpt/version_0", "base/version_3"]
    assert [path.name for path in report.pictures] == ["scales_1.png", "scales_2.png"]


def _error(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    assert stopped.value.code == 2  # as compare and diagnose
    return capsys.readouterr().err


def test_bad_run_folders_are_clear_errors(run, tmp_path, capsys):
    for arguments, message in (
        (["nowhere"], "no such folder"),
        (
            [str(tmp_path / "logs")],
            "Expected the folder of one run. There are event files in .*gpt",
        ),
    ):
        text = _error(capsys, *arguments)
        assert text.startswith("lightning-unitscale report: ")
        assert re.search(message, text)
    (tmp_path / "void").mkdir()
    assert "no event files here. Expected the folder that" in _error(capsys, "void")
    write(tmp_path / "plain", [])
    assert "no scales. Expected a run whose Trainer had a ScaleMon" in _error(capsys, "plain")


def test_unwritable_output_is_an_error(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    for output in ("file", "file/report"):
        text = _error(capsys, str(run), "--output", output)
        assert f"output='{output}': this folder is not writable" in text
    with pytest.raises(TypeError, match=r"output=3: it is an int. Expected the path"):
        write_report([run], 3)


def test_tensor_names_are_escaped_in_script(tmp_path):
    hostile = ("</script><b>", *NAMES[1:])
    write(tmp_path / "run", [snapshot(0, names=hostile)])
    page = write_report([tmp_path / "run"], tmp_path / "out").page.read_text()
    assert page.count("</script>") == 2
    assert "<b>" not in page


def test_bundle_has_modules_in_dependency_order():
    text = bundle("app.js", "source.js", "theme.js")
    modules = sorted(path.name for path in STATIC.glob("*.js") if path.name != "index.js")
    order = [line.split("'")[1] for line in text.splitlines() if line.startswith("modules[")]
    assert sorted(order) == modules
    assert order.index("dom.js") < order.index("heatmap.js") < order.index("app.js")
    assert "\nimport " not in text and "\nexport " not in text
