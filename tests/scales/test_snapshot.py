"""Statistics are read from rows: moments, fractions at any scale, merging across micro-batches."""

import json
import math

import networkx as nx
import numpy as np
import pytest
import torch

from lightning_unitscale.formats import BF16, E4M3FN, E5M2, FP16, NumberFormat, get_format
from lightning_unitscale.scales.layout import FORMAT_KINDS, MEASURED, RowLayout, kind_weights
from lightning_unitscale.scales.reduce import (
    absent_rows,
    empty_rows,
    joined_rows,
    merge_rows,
    split_rows,
)
from lightning_unitscale.scales.snapshot import ScaleSnapshot, TensorStatistics, merged_by_name
from lightning_unitscale.scales.statistics import statistics_row

LAYOUT = RowLayout(sample_size=None)
DTYPES = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}


def read(tensor, layout=LAYOUT, **kwargs):
    return TensorStatistics(statistics_row(tensor, layout).numpy(), layout, **kwargs)


def snapshot(tensors, gradients=None, layout=LAYOUT, **kwargs):
    forward = torch.stack([statistics_row(tensor, layout) for tensor in tensors])
    backward = absent_rows(len(tensors), layout)
    for position, gradient in (gradients or {}).items():
        backward[position] = statistics_row(gradient, layout)
    names = kwargs.pop("names", tuple(f"block.{i}.linear" for i in range(len(tensors))))
    return ScaleSnapshot(
        step=kwargs.pop("step", 3),
        names=names,
        forward=forward.numpy(),
        backward=backward.numpy(),
        layout=layout,
        **kwargs,
    )


def test_moments_match_torch():
    tensor = torch.randn(50, 40, dtype=torch.float64) * 3e-4 + 1e-4
    found = read(tensor)
    assert found.numel == found.num_finite == 2000
    assert found.mean == pytest.approx(float(tensor.mean()))
    assert found.mean_abs == pytest.approx(float(tensor.abs().mean()))
    assert found.std == pytest.approx(float(tensor.std()))
    assert found.rms == pytest.approx(float(tensor.square().mean().sqrt()))
    assert found.log2_rms == pytest.approx(math.log2(found.rms))
    assert found.abs_max == float(tensor.abs().max())
    assert found.abs_min == float(tensor.abs().min())


def test_moments_exclude_nonfinite_elements():
    found = read(torch.tensor([1.0, math.nan, -3.0, math.inf, 0.0]))
    assert (found.numel, found.num_finite, found.nans, found.infs, found.zeros) == (5, 3, 1, 1, 1)
    assert found.mean == pytest.approx(-2 / 3)
    assert found.abs_max == 3 and found.abs_min == 1


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_moments_of_nonfinite_or_empty_tensor_are_nan(values):
    found = read(torch.tensor(values))
    numbers = [found.mean, found.mean_abs, found.rms, found.std, found.log2_rms]
    assert all(math.isnan(number) for number in [*numbers, found.abs_max, found.abs_min])
    fraction = found.fraction(FP16, "overflow")
    assert fraction == 0 if values else math.isnan(fraction)


def test_moments_of_zeros():
    found = read(torch.zeros(4))
    assert found.rms == found.std == found.abs_max == 0
    assert found.log2_rms == -math.inf
    assert math.isnan(found.abs_min)


def test_std_of_one_element_is_nan():
    assert math.isnan(read(torch.tensor([2.0])).std)


@pytest.mark.parametrize("log2_factor", [-60, -3, 0, 4, 60])
def test_scaled_statistics_match_scaled_tensor(log2_factor):
    tensor = torch.randn(3000) - 0.5
    found, expected = read(tensor).scaled(log2_factor), read(tensor * 2.0**log2_factor)
    names = ["mean", "mean_abs", "rms", "std", "abs_max", "abs_min", "log2_rms", "numel", "zeros"]
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6), name
    assert found.scaled(-log2_factor).rms == read(tensor).rms


def test_fractions_of_monitored_formats_are_exact():
    tensor = torch.randn(5000) * 2.0**-6
    found = read(tensor)
    for item in LAYOUT.formats:
        cast = tensor.to(DTYPES[item]).float().abs()
        assert found.fraction(item, "flushed") * 5000 == int(((cast == 0) & (tensor != 0)).sum())
        small = (cast > 0) & (cast < item.smallest_normal)
        assert found.fraction(item.name, "subnormal") * 5000 == int(small.sum())


@pytest.mark.parametrize("shift", [-30, -12, -5, 0, 5, 12, 30])
@pytest.mark.parametrize("item", DTYPES, ids=str)
def test_fractions_of_any_format_at_any_shift(item, shift):
    tensor = torch.randn(200_000) * torch.exp2(torch.empty(200_000).uniform_(-8, 8))
    found = read(tensor, layout=RowLayout(formats=(), sample_size=None)).scaled(shift)
    moved = tensor * 2.0**shift
    cast = moved.to(DTYPES[item]).float().abs()
    over = cast.isinf() if item.has_infinity else moved.abs() > item.max
    expected = {
        "overflow": over,
        "subnormal": (cast > 0) & (cast < item.smallest_normal),
        "flushed": (cast == 0) & (moved != 0),
    }
    for kind, elements in expected.items():
        fraction = found.fraction(item, kind)
        # The flushing threshold is a power of two, and no element equals it.
        tolerance = 0 if kind == "flushed" else 0.004
        assert abs(fraction - float(elements.double().mean())) <= tolerance + 1e-12, kind


def test_fractions_are_exact_at_powers_of_two():
    tensor = torch.exp2(torch.arange(-40.0, 40.0)) * 1.5
    counts = read(tensor).exponent_counts

    def lost(format, kind, shift=0):
        return counts @ kind_weights(format, kind, shift)

    assert lost(get_format("E8M7"), "overflow") == 0
    # 2**-25 * 1.5 rounds to the smallest subnormal, 2**-26 * 1.5 to zero.
    assert lost(FP16, "flushed") == 15
    assert lost(FP16, "flushed", shift=3) == 12
    assert lost(FP16, "overflow", shift=-8) == pytest.approx(40 - 16 - 8, abs=1e-3)


def test_bad_fraction_arguments_are_an_error():
    found = read(torch.ones(3), layout=RowLayout(histogram=False))
    assert found.exponent_counts is None and found.num_sampled == 0
    with pytest.raises(ValueError, match="no exponent counts"):
        found.fraction(BF16, "overflow")
    with pytest.raises(ValueError, match="no exponent counts"):
        found.scaled(2).fraction(FP16, "overflow")
    with pytest.raises(ValueError, match="kind='underflow': unknown"):
        found.fraction(FP16, "underflow")


def test_snapshot_by_name_and_direction():
    tensors = [torch.randn(30), torch.randn(20) * 8]
    found = snapshot(tensors, {1: torch.full((20,), 0.25)})
    assert len(found) == 2 and found.modules == ("block.0", "block.1")
    assert found.statistics("block.1.linear").rms == pytest.approx(read(tensors[1]).rms)
    assert found.statistics(1, "backward").log2_rms == -2
    assert found.statistics(0, "backward") is None
    np.testing.assert_allclose(found.log2_rms("backward"), [math.nan, -2])
    assert found.log2_rms()[0] == pytest.approx(found.statistics(0).log2_rms)
    assert found.column("numel").tolist() == [30, 20]
    assert found.exponent_counts("backward")[1].sum() == 20
    fractions = found.fractions()
    assert fractions.shape == (2, 3, 3)
    assert fractions[1, 1, 1] == found.statistics(1).fraction(E4M3FN, "subnormal")
    assert np.isnan(found.fractions("backward")[0]).all()


def test_stored_statistics_match_scaled_tensor():
    tensor = torch.randn(60_000) * 2.0**-9
    row = statistics_row(tensor, LAYOUT, factor=torch.tensor(2.0**9)).numpy()[None]
    found = ScaleSnapshot(
        step=0,
        names=("a",),
        forward=row,
        backward=row,
        layout=LAYOUT,
        log2_sigma=np.array([-9]),
        log2_gamma=np.array([4]),
    )
    stored = found.statistics("a", stored=True)
    assert stored.rms == pytest.approx(1, rel=0.02)
    assert found.log2_rms(stored=True)[0] == found.log2_rms()[0] + 9
    assert found.log2_amax("forward")[0] == math.log2(stored.abs_max)
    gradient = found.log2_rms("backward")[0]
    assert found.log2_rms("backward", stored=True)[0] == gradient - 4
    for is_stored, log2_factor in ((True, 9), (False, 0)):
        exact = read(tensor * 2.0**log2_factor)
        ours = found.statistics("a", stored=is_stored)
        for i, item in enumerate(LAYOUT.formats):
            for j, kind in enumerate(FORMAT_KINDS):
                difference = abs(ours.fraction(item, kind) - exact.fraction(item, kind))
                # The true values' shares are told from the exponents.
                assert difference <= (0 if is_stored else 0.01)
                if is_stored:
                    assert found.fractions()[0, i, j] == ours.fraction(item, kind)


def test_merged_snapshot_matches_joint_tensors():
    first, second = [torch.randn(30), torch.zeros(3)], [torch.randn(50) * 9, torch.ones(5)]
    merged = merged_by_name(
        [snapshot(first, {0: first[0]}), snapshot(second, {1: second[1]}, step=9)]
    )
    joint = snapshot([torch.cat(pair) for pair in zip(first, second, strict=True)])
    np.testing.assert_allclose(merged.forward, joint.forward, rtol=1e-7)
    assert merged.step == 3
    assert merged.statistics(0, "backward").numel == 30
    assert merged.statistics(1, "backward").rms == 1


def test_merge_keeps_only_common_tensors_with_equal_units():
    tensors = [torch.ones(3), torch.ones(4), torch.ones(5)]
    one = snapshot(tensors, names=("a", "b", "c"))
    other = snapshot(tensors[::-1], names=("c", "b", "d"), log2_sigma=np.array([0, 1, 0]))
    merged = merged_by_name([one, other])
    assert merged.names == ("c",)
    assert merged.statistics("c").numel == 10


def test_merging_empty_rows_changes_nothing():
    row = statistics_row(torch.randn(10), LAYOUT)[None]
    for neutral in (empty_rows(1, LAYOUT), absent_rows(1, LAYOUT), torch.zeros_like(row)):
        assert torch.equal(merge_rows(row, neutral, LAYOUT), row)
        assert torch.equal(merge_rows(neutral, row, LAYOUT), row)
    assert merge_rows(absent_rows(2, LAYOUT), absent_rows(2, LAYOUT), LAYOUT).isnan().all()


def test_reduction_over_ranks_matches_whole_tensor():
    batches = [[torch.randn(20), torch.zeros(3), torch.ones(0)] for _ in range(3)]
    rows = [torch.stack([statistics_row(t, LAYOUT) for t in batch]) for batch in batches]
    # A gradient that no rank has, and one that only the last rank has.
    rows = [torch.cat([part, absent_rows(2, LAYOUT)]) for part in rows]
    rows[2][4] = rows[2][0]
    sums, extremes = zip(*(split_rows(part, LAYOUT) for part in rows), strict=True)
    found = joined_rows(sum(sums), torch.stack(extremes).amax(0), LAYOUT)
    joint = statistics_row(torch.cat([batch[0] for batch in batches]), LAYOUT)
    torch.testing.assert_close(found[0], joint, rtol=1e-7, atol=1e-6)
    assert found[1, 1] == 9 and found[1, 8] == math.inf
    assert found[2, 0] == 0 and found[2, 8] == math.inf
    assert found[3].isnan().all()
    assert torch.equal(found[4], rows[2][0])


def test_bad_snapshot_arguments_are_an_error():
    with pytest.raises(ValueError, match="'a' is given twice"):
        snapshot([torch.ones(1), torch.ones(1)], names=("a", "a"))
    with pytest.raises(ValueError, match="forward of length 1: does not fit 2 names"):
        snapshot([torch.ones(1)], names=("a", "b"))
    with pytest.raises(ValueError, match="log2_sigma of length"):
        snapshot([torch.ones(1)], log2_sigma=np.array([1, 2]))
    found = snapshot([torch.ones(1)])
    with pytest.raises(KeyError, match="not in this snapshot"):
        found.statistics("nowhere")
    with pytest.raises(ValueError, match="direction='sideways'"):
        found.rows("sideways")


def test_fractions_of_custom_format():
    own = NumberFormat("own", 3, 2)
    found = read(torch.tensor([20.0, 0.1, 0.01]), layout=RowLayout(formats=(own,)))
    assert [found.fraction(own, kind) for kind in FORMAT_KINDS] == [1 / 3] * 3


def test_networkx_graph_has_every_tensor_and_edge(tmp_path):
    tensors = [torch.full((4,), 2.0), torch.zeros(2, 3), torch.tensor([1.0, math.nan])]
    found = snapshot(
        tensors,
        {0: torch.full((4,), 0.5)},
        names=("input", "block.a", "block.b"),
        modules=("", "block", "block"),
        inputs=((), ("input",), ("input", "block.a", "elsewhere")),
        operands=(True, False, False),
        matmuls=(False, True, False),
    )
    graph = found.to_networkx()
    assert list(graph) == list(found.names) and graph.graph == {"step": 3}
    assert sorted(graph.edges(data="numel")) == [
        ("block.a", "block.b", 6),
        ("input", "block.a", 4),
        ("input", "block.b", 4),
    ]
    given, zeros, last = graph.nodes.values()
    assert given["forward_rms"] == 2.0 and given["backward_log2_rms"] == -1.0
    assert given["operand"] and not given["matmul"] and zeros["matmul"]
    # Only what is known and finite.
    assert zeros["forward_rms"] == 0.0 and "forward_log2_rms" not in zeros
    assert not any(number.startswith("backward") for number in zeros)
    assert last["forward_nans"] == 1 and last["module"] == "block"
    assert "forward_std" not in last
    for name, node in graph.nodes.items():
        statistics = found.statistics(name)
        known = {f"forward_{number}": getattr(statistics, number) for number in MEASURED}
        assert (
            node.items() >= {key: one for key, one in known.items() if math.isfinite(one)}.items()
        )
    assert nx.dag_longest_path(graph, weight="numel") == ["input", "block.a", "block.b"]
    json.dumps(nx.node_link_data(graph), allow_nan=False)
    nx.write_graphml(graph, tmp_path / "scales.graphml")
    assert nx.read_graphml(tmp_path / "scales.graphml").edges == graph.edges
    assert list(found.select(["block.a", "block.b"]).to_networkx().edges) == [
        ("block.a", "block.b")
    ]
