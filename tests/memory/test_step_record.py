"""The simulated allocator on synthetic records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_unitscale.memory.costs import OperatorCosts
from lightning_unitscale.memory.step_record import (
    OUTSIDE,
    Event,
    OperatorCall,
    StepRecord,
    StorageLife,
    allocated_bytes,
    memory_timeline,
    peak_of,
)


def _record(
    sizes: list[int], events: list[tuple[int, int, int]], operators: int, device: str = "cpu"
) -> StepRecord:
    born = {storage: place for storage, change, place in reversed(events) if change > 0}
    lives = [StorageLife(size, born=born.get(place, OUTSIDE)) for place, size in enumerate(sizes)]
    calls = [OperatorCall(f"op{place}", "forward", OUTSIDE) for place in range(operators)]
    there = [Event(place, size, OUTSIDE) for place, size in enumerate(sizes) if place not in born]
    return StepRecord(device, [], lives, calls, [*there, *(Event(*event) for event in events)])


def test_existing_storages_count_from_start() -> None:
    timeline, peak = memory_timeline(_record([100, 10, 5], [(1, 10, 0), (1, -10, 0), (2, 5, 1)], 2))
    assert timeline.before_bytes == 100
    assert timeline.live_bytes == (110, 105)
    assert (peak.num_bytes, peak.moment, peak.operator) == (110, 0, "op0")
    assert timeline.after_bytes == 105


def test_workspace_adds_to_results_at_peak() -> None:
    record = _record([100, 10], [(1, 10, 0)], 1)
    call = OperatorCall("op", "forward", OUTSIDE, OperatorCosts(workspace_bytes=7))
    timeline, peak = memory_timeline(StepRecord("cpu", [], record.storages, [call], record.events))
    assert peak.num_bytes == 117
    assert peak.by_kind["temporary"] == 117
    assert timeline.after_bytes == 110


def test_cuda_rounds_up_to_blocks() -> None:
    assert [allocated_bytes(size, "cuda") for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert allocated_bytes(513, "cpu") == 513
    timeline, peak = memory_timeline(_record([100, 600], [(1, 600, 0)], 1, "cuda"))
    assert (timeline.before_bytes, peak.num_bytes) == (512, 512 + 1024)


def test_resized_storage_changes_live_bytes() -> None:
    timeline, _ = memory_timeline(_record([30], [(0, 10, 0), (0, 20, 1), (0, -30, 2)], 3))
    assert timeline.live_bytes == (10, 30, 30)
    assert timeline.after_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_live_bytes_are_sum_of_live_storages(lives: list[tuple[int, int, int]]) -> None:
    """Against the sum, at every operator, of the storages that are alive."""
    spans = [(size, min(a, b), max(a, b)) for size, a, b in lives]
    events = []
    for place in range(7):
        events += [(i, size, place) for i, (size, a, _) in enumerate(spans) if a == place and size]
        events += [(i, -size, place) for i, (size, _, b) in enumerate(spans) if b == place and size]
    timeline, peak = memory_timeline(_record([size for size, _, _ in spans], events, 7))
    expected = [sum(size for size, a, b in spans if a <= place <= b) for place in range(7)]
    assert list(timeline.live_bytes) == expected
    assert peak.num_bytes == max([*expected, 0])
    assert peak_of(Event(*event) for event in events) == max([*expected, 0])
