"""A few published architectures with different traits: the same bits, with operands at RMS 1.

All of them, measured in the same way: ``benchmarks/architectures.py``.
"""

import pytest

pytest.importorskip("transformers")

from benchmarks.architecture_steps import differences, train
from benchmarks.architectures import (
    differing_gradients,
    equal_bits,
    examine,
    run_step,
    seed_everything,
)
from benchmarks.model_zoo import ZOO
from lightning_unitscale.transforms import prune_non_float_tensors, track_scales

pytestmark = pytest.mark.slow
# Warnings of other packages while a model is traced.
_EXPECTED = ("Dynamo detected a call to a `functools.lru_cache`", "To copy construct from a tensor")


@pytest.mark.parametrize(
    "name",
    [
        "GPT-2",  # addmm, dropout
        "Mixtral",  # grouped matmuls
        "Mamba",  # slices, a loop over time
        "ResNet",  # convolutions, batch norm's buffers
        "Wav2Vec2",  # NumPy's random numbers, weight norm, in-place masks
        "T5",  # two stacks, shared weights
    ],
)
def test_lossless_is_bit_identical_with_operands_near_rms_1(name: str) -> None:
    result = examine(name)
    assert not result.error
    assert result.loss_equal
    assert result.differing == []
    assert [one for one in result.warnings if not any(text in one for text in _EXPECTED)] == []
    assert result.plain is not None and result.ours is not None
    assert result.plain.forward < 0.6
    assert min(result.ours.forward, result.ours.stored, result.ours.gradients) >= 0.99


@pytest.mark.filterwarnings(*(f"ignore:{text}" for text in _EXPECTED))
@pytest.mark.parametrize(
    "name",
    [
        "Llama",  # tensors that ``to`` hands back as they are
        "Wav2Vec2",  # changes requires_grad and writes in place between its graphs
    ],
)
def test_tracked_model_is_bit_identical(name: str) -> None:
    seed_everything()
    model, inputs = ZOO[name]()
    tracked = track_scales(model)
    plain, ours = run_step(model, inputs), run_step(tracked, inputs)
    assert equal_bits(plain.loss, ours.loss)
    assert differing_gradients(plain, ours) == ([], 0.0)
    graph = tracked.scales_graph()
    graph.lint()
    metrics = [node.meta["metrics"] for node in prune_non_float_tensors(graph).nodes]
    measured = [one for one in metrics if one is not None]
    assert len(measured) > 100
    assert sum(one.bwd is not None for one in measured) > 0.8 * len(measured)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "ViT"])
def test_step_in_a_trainer_is_captured_whole(name: str) -> None:
    plain, ours = train(name, None), train(name, "min_cut")
    assert ours.num_graphs == 1 and ours.breaks == []
    assert differences(plain, ours) == (0.0, 0.0)
    assert len(set(map(float, plain.losses))) == len(plain.losses)
