"""Data read from an event file equals the data written."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_unitscale.formats import E4M3FN, NumberFormat
from lightning_unitscale.scales.layout import DIRECTIONS
from lightning_unitscale.tensorboard.schema import (
    QUANTITIES,
    ExponentCounts,
    Series,
    TensorSet,
    content,
    exponent_vectors,
    parse_content,
)

ROOT = Path(__file__).parents[2]
OWN = NumberFormat("own", 3, 2, finite_only=True)
TENSORS = TensorSet(
    ("a.linear", "b/c d.é@1"),
    ("a", ""),
    (E4M3FN, OWN),
    operands=(True, False),
    matmuls=(False, True),
)


@pytest.mark.parametrize("subject", ["1c0ffee5", "blocks.0.attn.linear_1@2", "with/slashes/0", "é"])
@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tags_are_parsed_back(direction, quantity, subject):
    series = Series(direction, quantity, subject)
    assert Series.parse(series.tag) == series


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "loss",
        "scales",
        "scales/forward",
        "scales/forward/log2_rms",
        "scales/forward/log2_rms/",
        "scales/sideways/log2_rms/0",
        "scales/forward/median/0",
        "other/forward/log2_rms/0",
    ],
)
def test_foreign_tags_are_ignored(tag):
    assert Series.parse(tag) is None


def test_tensor_set_survives_content_round_trip():
    assert TensorSet.from_content(TENSORS.to_content()) == TENSORS
    assert TensorSet.from_content(content()) is None
    assert replace(TENSORS).key == TENSORS.key and len(TENSORS.key) == 8
    assert replace(TENSORS, operands=(True, True)).key != TENSORS.key
    assert TensorSet(TENSORS.names, ("a", "b"), TENSORS.formats).key != TENSORS.key


@pytest.mark.parametrize("data", [b"", b"no json \xff", b"[]", b"{}", b'{"version":99}'])
def test_foreign_content_is_ignored(data):
    assert parse_content(data) is None
    assert TensorSet.from_content(data) is None


@pytest.mark.parametrize("bins", [[], [0], [278], [100, 101, 130], range(279)])
def test_exponent_counts_survive_round_trip(bins):
    counts = np.zeros(279)
    counts[list(bins)] = np.arange(len(bins)) + 1
    (vector,) = exponent_vectors(counts[None], [16_384], [-7])
    assert vector.size == 3 + (max(bins) - min(bins) + 1 if bins else 0)
    found = ExponentCounts.from_vector(vector)
    assert found.num_sampled == 16_384 and found.log2_unit == -7
    np.testing.assert_array_equal(found.counts, counts)


@pytest.mark.parametrize(
    "vector", [[], [1.0, 2.0], np.zeros((3, 3)), [8, 0, 128, 1, 1], [8, 0, -151]]
)
def test_bad_exponent_vector_is_an_error(vector):
    with pytest.raises(ValueError, match="not exponent counts"):
        ExponentCounts.from_vector(vector)


def test_schema_does_not_import_torch():
    code = "import sys; import lightning_unitscale.tensorboard.schema; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "lightning", "tensorboard"} & set(done.stdout.split())
