"""A few published architectures with different traits: the same bits, with operands at RMS 1.

All of them, measured in the same way: ``benchmarks/architectures.py``.
"""

import pytest

pytest.importorskip("transformers")

from benchmarks.architectures import examine

# What third parties say while a model is traced.
_EXPECTED = ("Dynamo detected a call to a `functools.lru_cache`", "To copy construct from a tensor")


@pytest.mark.parametrize("depth", ["products", "all"])
@pytest.mark.parametrize(
    "name",
    [
        "GPT-2",  # addmm, dropout, a graph break in the loss
        "Mixtral",  # grouped products
        "Mamba",  # another algorithm under a compiler, slices
        "ResNet",  # convolutions, batch norm's buffers
        "Wav2Vec2",  # NumPy's random numbers, weight norm, in-place masks, many graphs
        "T5",  # two stacks, shared weights
    ],
)
def test_same_bits_with_operands_near_one(name: str, depth: str) -> None:
    result = examine(name, depth)
    assert not result.error
    assert result.loss_equal
    assert result.differing == []
    assert [one for one in result.warnings if not any(text in one for text in _EXPECTED)] == []
    assert result.plain is not None and result.ours is not None
    assert result.plain.forward < 0.6
    assert min(result.ours.forward, result.ours.stored, result.ours.gradients) >= 0.99
