"""The contents of a real event file, read back with TensorBoard's own reader."""

import math
import re

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.reduce import absent_rows
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.tensorboard.protobuf import histogram_proto
from lightning_unitscale.tensorboard.schema import ExponentCounts, Series, TensorSet
from lightning_unitscale.tensorboard.writer import ScaleWriter, custom_scalars_layout

LAYOUT = RowLayout()
NAMES = ("model.blocks.0.attn.linear", "model.blocks.0.mlp.gelu_1@2", "model.head.linear", "loss")


def snapshot(step=0, names=NAMES, backward=True, layout=LAYOUT, **kwargs):
    rows = [statistics_row(torch.randn(500) * 2.0**-i, layout) for i in range(len(names))]
    gradients = absent_rows(len(names), layout)
    if backward:
        gradients[1] = statistics_row(torch.full((40,), 2.0**-20), layout)
        gradients[2:3] = statistics_row(torch.zeros(7), layout)
    number = len(names)
    # A matmul reads the first and makes the second, which the third one reads.
    options = {"operands": (True, False, True, False), "matmuls": (False, True, False, False)}
    options = {key: flags[:number] for key, flags in options.items()} | kwargs
    return ScaleSnapshot(
        step, names, torch.stack(rows).numpy(), gradients.numpy(), layout, **options
    )


@pytest.fixture
def experiment(tmp_path):
    with SummaryWriter(str(tmp_path / "run")) as experiment:
        yield experiment


def read(experiment):
    experiment.flush()
    keep_all = {"tensors": 0, "scalars": 0, "histograms": 0}
    return EventAccumulator(experiment.log_dir, size_guidance=keep_all).Reload()


def arrays(events, tag):
    return {
        event.step: tensor_util.make_ndarray(event.tensor_proto) for event in events.Tensors(tag)
    }


def ours(events):
    """Quantities of the plugin by direction and quantity."""
    found = {}
    for tag in events.PluginTagToContent("scales"):
        series = Series.parse(tag)
        found[series.direction, series.quantity, series.subject] = tag
    return found


def test_plugin_vectors_are_written(experiment):
    writer = ScaleWriter(experiment)
    snapshots = [snapshot(step, log2_sigma=np.array([0, 1, -2, 0])) for step in (0, 50)]
    for one in snapshots:
        writer.write(one)
    events = read(experiment)
    one = snapshots[0]
    fields = (one.modules, LAYOUT.formats, one.inputs, one.operands, one.matmuls)
    key = TensorSet(NAMES, *fields).key
    tags = ours(events)
    for direction in ("forward", "backward"):
        rms = arrays(events, tags[direction, "log2_rms", key])
        units = arrays(events, tags[direction, "log2_unit", key])
        fractions = arrays(events, tags[direction, "fractions", key])
        for one in snapshots:
            expected = one.log2_rms(direction, stored=True).astype(np.float32)
            np.testing.assert_array_equal(rms[one.step], expected)
            np.testing.assert_array_equal(units[one.step], one.log2_divisors(direction))
            expected = one.fractions(direction)
            np.testing.assert_allclose(fractions[one.step], expected, rtol=1e-3)
    assert rms[0][2] == -math.inf and np.isnan(rms[0][[0, 3]]).all()
    described = events.SummaryMetadata(tags["forward", "log2_rms", key])
    assert described.data_class == DATA_CLASS_TENSOR, Summary
    assert described.plugin_data.plugin_name == "scales"
    found = TensorSet.from_content(described.plugin_data.content)
    assert found.names == NAMES and found.formats == LAYOUT.formats and found.key == key


def test_constant_vectors_are_written_when_they_change(experiment):
    writer = ScaleWriter(experiment)
    spacings = {0: (0.25, 0.5), 10: (0.25, 0.5), 20: (1.0, 0.5), 30: (0.25, 0.5)}
    steps = [snapshot(step, spacing=spacing) for step, spacing in spacings.items()]
    for one in steps:
        writer.write(one)
    found = {key[:2]: arrays(read(experiment), tag) for key, tag in ours(read(experiment)).items()}
    assert {step: vector.tolist() for step, vector in found["forward", "spacing"].items()} == {
        0: [0.25], 20: [1.0], 30: [0.25],
    }  # fmt: skip
    assert list(found["backward", "spacing"]) == [0]
    for direction in ("forward", "backward"):
        (numel,) = found[direction, "numel"].values()
        np.testing.assert_array_equal(numel, steps[0].column("numel", direction))
    # Another file has them again.
    experiment.close()
    writer.write(snapshot(40))
    again = {key[:2]: arrays(read(experiment), tag) for key, tag in ours(read(experiment)).items()}
    assert list(again["forward", "numel"]) == [0, 40]


def test_exponent_counts_are_written(experiment):
    one = snapshot(7, log2_gamma=np.array([0, -20, 0, 0]))
    ScaleWriter(experiment).write(one)
    events = read(experiment)
    for direction, names in (("forward", NAMES), ("backward", NAMES[1:3])):
        tags = {k[2]: t for k, t in ours(events).items() if k[:2] == (direction, "exponents")}
        assert tuple(tags) == names
        for name, tag in tags.items():
            measured = ExponentCounts.from_vector(arrays(events, tag)[7])
            place = NAMES.index(name)
            np.testing.assert_array_equal(measured.counts, one.exponent_counts(direction)[place])
            assert measured.num_sampled == one.column("sampled", direction)[place]
            assert measured.log2_unit == one.log2_divisors(direction)[place]


STOCK = (
    "~scales/model.blocks.0/attn.linear",
    "~scales/model.blocks.0/mlp.gelu_1@2",
    "~scales/model.head/linear",
    "~scales/loss",
)
GRADIENT = f"{STOCK[1]}.grad"
# Operands of matmuls; a gradient of zeros has no logarithm to draw, and an absent one nothing.
SHOWN = {
    "scales": set(),
    "operands": {STOCK[0], STOCK[2], GRADIENT},
    "all": {*STOCK, GRADIENT},
}


@pytest.mark.parametrize("tabs", SHOWN)
def test_stock_tabs_have_selected_tensors(experiment, tabs):
    one = snapshot(3, log2_sigma=np.array([4, 0, 0, 0]))
    ScaleWriter(experiment, tabs=tabs).write(one)
    events = read(experiment)
    shown = SHOWN[tabs]
    assert set(events.Tags()["scalars"]) == {f"{tag}/log2_rms" for tag in shown}
    assert set(events.Tags()["histograms"]) == {f"{tag}/exponents" for tag in shown}
    assert ("custom_scalars__config__" in events.Tags()["tensors"]) == (tabs != "scales")
    # The Scales dashboard has everything in any case.
    exponents = [key[2] for key in ours(events) if key[:2] == ("forward", "exponents")]
    assert tuple(exponents) == NAMES


def test_stock_scalars_show_stored_values(experiment):
    one = snapshot(3, log2_sigma=np.array([4, 0, 0, 0]))
    ScaleWriter(experiment).write(one)
    events = read(experiment)
    (point,) = events.Scalars(f"{STOCK[0]}/log2_rms")
    assert point.step == 3
    assert point.value == pytest.approx(one.log2_rms()[0] - 4, rel=1e-6)
    assert events.Scalars(f"{GRADIENT}/log2_rms")[0].value == -20


def test_stock_histograms_are_binned_already(experiment):
    one = snapshot(3, log2_gamma=np.array([0, -20, 0, 0]))
    ScaleWriter(experiment).write(one)
    events = read(experiment)
    (event,) = events.Histograms(f"{STOCK[0]}/exponents")
    histogram = event.histogram_value
    counts = one.exponent_counts()[0]
    assert histogram.num == 500 == sum(histogram.bucket)
    assert histogram.bucket_limit[-1] == histogram.max
    for limit, count in zip(histogram.bucket_limit, histogram.bucket, strict=True):
        assert counts[int(limit) - 1 + 150] == count
    # 2**-20 in units of 2**-20: all in [0, 1) of log2.
    (event,) = events.Histograms(f"{GRADIENT}/exponents")
    assert (event.histogram_value.min, event.histogram_value.max) == (0, 1)
    assert list(event.histogram_value.bucket) == [40]


def test_moments_of_a_histogram():
    counts = np.zeros(279)
    counts[[150, 151]] = 3, 1
    assert histogram_proto(ExponentCounts(0 * counts, 0)) is None
    histogram = histogram_proto(ExponentCounts(counts, 4))
    assert histogram is not None
    assert (histogram.num, histogram.sum) == (4, 3 * 0.5 + 1.5)
    assert histogram.sum_squares == 3 * 0.25 + 2.25


def test_custom_scalars_group_by_block(experiment):
    writer = ScaleWriter(experiment, tabs="all")
    writer.write(snapshot(0))
    writer.write(snapshot(1))
    events = read(experiment)
    (config,) = arrays(events, "custom_scalars__config__").values()
    layout = Layout.FromString(config.item())
    assert [c.title for c in layout.category] == ["model.blocks.0", "model.head", "(top level)"]
    drawn = []
    for category in layout.category:
        assert [chart.title for chart in category.chart] == [
            "forward: log2 RMS",
            "backward: log2 RMS",
        ]
        for chart in category.chart:
            patterns = [re.compile(tag) for tag in chart.multiline.tag]
            drawn += [t for t in events.Tags()["scalars"] if any(p.match(t) for p in patterns)]
    # Everything is drawn, and nothing twice.
    assert sorted(drawn) == sorted(events.Tags()["scalars"])
    assert f"{GRADIENT}/log2_rms" in drawn


def test_custom_scalar_charts_match_across_runs():
    # TensorBoard shows charts that are equal once.
    more, fewer = (custom_scalars_layout(snapshot(names=NAMES[:n]), "operands") for n in (4, 2))
    assert more["model.blocks.0"] == fewer["model.blocks.0"]
    assert list(fewer) == ["model.blocks.0"]


def test_table_is_written_as_text(experiment):
    ScaleWriter(experiment).finish(snapshot(12))
    (text,) = arrays(read(experiment), "~scales/table/text_summary").values()
    text = text.item().decode()
    assert "| tensor" in text and "gelu_1@2`" in text


def test_repeated_and_smaller_steps(experiment):
    writer = ScaleWriter(experiment)
    for step in (0, 50, 50, 100, 0, 50):
        writer.write(snapshot(step))
    experiment.flush()
    reader = EventAccumulator(experiment.log_dir, purge_orphaned_data=False).Reload()
    steps = [event.step for event in reader.Scalars(f"{STOCK[0]}/log2_rms")]
    assert steps == [0, 50, 100, 0, 50]


def test_other_tensors_start_new_set(experiment):
    writer = ScaleWriter(experiment)
    writer.write(snapshot(0))
    writer.write(snapshot(1, names=NAMES[:2]))
    # A second fit makes a writer of its own for the same file.
    ScaleWriter(experiment).write(snapshot(2, names=NAMES[:3]))
    events = read(experiment)
    tags = [tag for key, tag in ours(events).items() if key[:2] == ("forward", "log2_rms")]
    assert sorted(array.size for tag in tags for array in arrays(events, tag).values()) == [2, 3, 4]
    for tag in tags:
        (array,) = arrays(events, tag).values()
        content = events.SummaryMetadata(tag).plugin_data.content
        assert len(TensorSet.from_content(content).names) == array.size


def test_reopened_file_is_described_again(tmp_path):
    experiment = SummaryWriter(str(tmp_path))
    writer = ScaleWriter(experiment)
    writer.write(snapshot(0))
    experiment.close()
    writer.write(snapshot(1))
    experiment.close()
    latest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    events = EventAccumulator(str(latest)).Reload()
    assert ("forward", "log2_rms") in {key[:2] for key in ours(events)}


def test_empty_snapshot_and_foreign_logger_write_nothing(experiment):
    class Stranger:
        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    ScaleWriter(Stranger()).write(snapshot(0))
    ScaleWriter(Stranger()).finish(snapshot(0))
    writer = ScaleWriter(experiment)
    empty = np.zeros((0, LAYOUT.num_columns))
    writer.write(ScaleSnapshot(0, (), empty, empty, LAYOUT))
    events = read(experiment)
    assert not events.Tags()["scalars"] and not events.Tags()["tensors"]


def test_snapshots_without_histograms_or_gradients(experiment):
    ScaleWriter(experiment).write(snapshot(1, backward=False))
    ScaleWriter(experiment).write(snapshot(2, layout=RowLayout(histogram=False)))
    events = read(experiment)
    assert all(
        event.step == 1 for t in events.Tags()["histograms"] for event in events.Histograms(t)
    )
    backward = [tag for key, tag in ours(events).items() if key[0] == "backward"]
    assert backward and not any(1 in arrays(events, tag) for tag in backward)


@pytest.mark.slow
def test_long_runs_are_thinned(experiment):
    writer = ScaleWriter(experiment)
    one = snapshot(0, names=("a",), backward=False)
    for step in range(2200):
        object.__setattr__(one, "step", step)
        writer.write(one, complete=step == 2101)
    writer.finish(one)
    events = read(experiment)
    tags = {key[1]: tag for key, tag in ours(events).items()}
    written = {
        "vectors": arrays(events, tags["log2_rms"]),
        "fractions": arrays(events, tags["fractions"]),
        "scalars": [event.step for event in events.Scalars("~scales/a/log2_rms")],
        "exponents": arrays(events, tags["exponents"]),
        "histograms": [event.step for event in events.Histograms("~scales/a/exponents")],
    }
    for part, steps in written.items():
        expected = {
            step for step in range(2200) if step % (1 << (step // BEFORE[part]).bit_length()) == 0
        }
        assert set(steps) == expected | {2101, 2199}, part
        assert len(steps) == len(set(steps))


BEFORE = {"vectors": 2000, "fractions": 500, "scalars": 250, "exponents": 64, "histograms": 16}


def test_nonfinite_tensor_has_no_scalar(experiment):
    rows = statistics_row(torch.tensor([math.nan, math.inf]), LAYOUT).numpy()[None]
    ScaleWriter(experiment).write(ScaleSnapshot(0, ("a",), rows, rows, LAYOUT))
    assert not read(experiment).Tags()["scalars"]


def test_graph_nodes_have_scales(experiment):
    inputs = ((), (NAMES[0],), (NAMES[1], NAMES[0]), (NAMES[2], "unknown"))
    one = snapshot(5, inputs=inputs, log2_sigma=np.array([3, 0, 0, 0]))
    writer = ScaleWriter(experiment)
    writer.write(one)
    writer.finish(one)
    graph = read(experiment).Graph()
    assert [node.name for node in graph.node] == [
        "model/blocks/0/attn/linear",
        "model/blocks/0/mlp/gelu_1_2",
        "model/head/linear",
        "loss",
    ]
    assert [node.op for node in graph.node] == ["linear", "gelu", "linear", "loss"]
    assert list(graph.node[2].input) == [graph.node[1].name, graph.node[0].name]
    assert list(graph.node[3].input) == [graph.node[2].name]
    attributes = {key: value.s.decode() for key, value in graph.node[0].attr.items()}
    meant = one.log2_rms()
    assert attributes["forward"] == f"RMS 2^{meant[0]:.2f}, stored 2^{meant[0] - 3:.2f}"
    assert attributes["backward"] == "not measured"
    assert graph.node[2].attr["forward"].s.decode() == f"RMS 2^{meant[2]:.2f}"
    assert graph.node[2].attr["backward"].s == b"all zero"
    # The panel of a node breaks longer words.
    assert max(map(len, attributes)) <= 8
    assert graph.node[0].device == "RMS near 2^-4"
