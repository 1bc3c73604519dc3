"""Saved values in host memory: schedules, plans, bits and bytes."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_unitscale.transforms as transforms
from lightning_unitscale.memory import offload_graph
from lightning_unitscale.memory.gpus import GPUS
from lightning_unitscale.memory.offload import (
    MAX_IN_FLIGHT,
    IdleValue,
    Move,
    described_link,
    exposed_seconds,
    idle_values,
    link_of,
    scheduled,
    start_times,
    without_moved,
)
from lightning_unitscale.memory.problem import NodeRegion, RematNode, RematProblem
from lightning_unitscale.memory.remat_module import _planner
from lightning_unitscale.remat import (
    HostLink,
    Planner,
    RematPartitioner,
    RematPlan,
    RematReport,
    pareto_front,
    plan_remat,
)
from tests.memory.oracles import measured_peak
from tests.memory.programs import all_plans, compiled, random_problem, run
from tests.memory.test_planner import Net, _counted

LINK = HostLink(4e9)


def _chain(num_layers: int, num_bytes: int = 10, seconds: float = 1.0) -> RematProblem:
    """Layers that each save their result, and the loss."""
    nodes = [RematNode("x", "placeholder", (), NodeRegion.INPUT, 0, 0, 1)]
    for i in range(1, num_layers + 2):
        is_loss = i == num_layers + 1
        size = 1 if is_loss else num_bytes
        nodes.append(
            RematNode(
                f"layer_{i}", "layer", (i - 1,), NodeRegion.FORWARD, i, i, size,
                seconds=seconds, flops=seconds, can_offload=not is_loss,
            )
        )  # fmt: skip
    loss = len(nodes) - 1
    nodes.append(RematNode("tangent", "placeholder", (), NodeRegion.BACKWARD, loss + 1, loss + 1))
    for i in range(num_layers, 0, -1):
        mine = len(nodes)
        reads = tuple(sorted((i, mine - 1)))
        nodes.append(
            RematNode(
                f"grad_{i}", "grad", reads, NodeRegion.BACKWARD, mine, mine, 1, seconds=2 * seconds
            )
        )
    return RematProblem(tuple(nodes), (loss,), (len(nodes) - 1,))


def _offloadable(problem: RematProblem) -> RematProblem:
    nodes = tuple(replace(node, can_offload=node.can_save) for node in problem.nodes)
    return replace(problem, nodes=nodes)


@pytest.fixture(scope="module")
def planner() -> Planner:
    torch.manual_seed(0)
    return replace(_planner(Net(2), (torch.randn(4, 64, 64),), {}, None, 0), link=LINK)


def _moved_plan(plan: RematPlan, link: HostLink, haste: float = 1.0) -> RematPlan:
    problem, timeline = plan.problem, plan.timeline
    values = idle_values(problem, plan.saved, plan.order, timeline)
    moves = scheduled(values, start_times(problem, timeline), timeline.num_forward, link, haste)
    return replace(plan, moves=moves, timeline=without_moved(problem, timeline, moves))


def test_single_copy_matches_brute_force_schedule() -> None:
    """Every schedule of one move of a chain, by brute force."""
    problem = _chain(6)
    plan = Planner(problem).default
    starts = start_times(problem, plan.timeline)
    num_forward, count = plan.timeline.num_forward, len(plan.timeline.nodes)
    for rate in (3.0, 5.0, 10.0, 40.0):
        link = HostLink(rate, 0.0)
        for value in idle_values(problem, plan.saved, plan.order, plan.timeline):
            found = scheduled([value], starts, num_forward, link)
            free = [
                (fetch - release, release, fetch)
                for release in range(value.start, num_forward)
                for fetch in range(num_forward, min(value.use, count - 1) + 1)
                if exposed_seconds(
                    problem,
                    [Move(value.node, value.start, release, fetch, value.use)],
                    starts,
                    link,
                )
                == 0
            ]
            if not free:
                assert found == ()
                continue
            best = max(free)
            (move,) = found
            assert (move.release, move.fetch) == best[1:]


@pytest.mark.parametrize("rate", [4.0, 8.0, 20.0, 1e6])
def test_copies_are_hidden_and_bounded_in_flight(rate: float) -> None:
    problem = _chain(40)
    link = HostLink(rate, 0.0)
    plan = _moved_plan(Planner(problem).default, link)
    assert plan.moves
    starts = start_times(problem, plan.timeline)
    assert exposed_seconds(problem, plan.moves, starts, link) == pytest.approx(0, abs=1e-9)
    for place in range(len(plan.timeline.nodes)):
        leaving = sum(move.start < place < move.release + 1 for move in plan.moves)
        returning = sum(move.fetch < place < move.use for move in plan.moves)
        assert max(leaving, returning) <= MAX_IN_FLIGHT
    for move in plan.moves:
        assert move.start <= move.release < plan.timeline.num_forward <= move.fetch <= move.use


def test_slower_link_than_planned_exposes_its_copies() -> None:
    problem = _chain(10)
    plan = _moved_plan(Planner(problem).default, HostLink(20.0, 0.0))
    starts = start_times(problem, plan.timeline)
    waits = [
        exposed_seconds(problem, plan.moves, starts, HostLink(rate, 0.0))
        for rate in (20.0, 10.0, 5.0, 2.5)
    ]
    assert waits[0] == 0 < waits[-1]
    assert waits == sorted(waits)


@pytest.mark.parametrize("seed", range(6))
def test_timeline_without_moved_values_while_on_host(seed: int) -> None:
    problem = _offloadable(random_problem(np.random.default_rng(seed), 10))
    planner = Planner(problem)
    num_moved = 0
    for saved in list(all_plans(problem))[::11]:
        plan = planner.plan_of("any", saved | (problem.region == NodeRegion.INPUT))
        for haste in (1.0, 1e9):
            moved = _moved_plan(plan, HostLink(20.0, 0.0), haste)
            num_moved += len(moved.moves)
            # A plan without moves, minus the bytes of each value that is gone.
            expected = _counted(plan)
            for place in range(len(expected)):
                gone = [m for m in moved.moves if m.release < place < m.fetch]
                expected[place] -= sum(problem.nodes[move.node].num_bytes for move in gone)
                for move in gone:  # nothing that runs meanwhile reads it
                    assert move.node not in problem.nodes[plan.timeline.nodes[place]].inputs
            assert moved.timeline.live_bytes.tolist() == expected
    assert num_moved


@pytest.mark.parametrize("rate", [2.0, 3.0, 5.0, 8.0, 15.0, 30.0])
def test_moves_match_brute_force(rate: float) -> None:
    """Every set of values of every plan on the device, at every haste, by brute force."""
    problem, link = _chain(7), HostLink(rate, 0.0)
    planner = Planner(problem, link=link)
    every: list[tuple[int, float]] = []
    for plan in {plan.hash: plan for plan in planner.tried(20)}.values():
        values = idle_values(problem, plan.saved, plan.order, plan.timeline)
        starts = start_times(problem, plan.timeline)
        subsets = (itertools.combinations(values, size) for size in range(len(values) + 1))
        for chosen in itertools.chain.from_iterable(subsets):
            for haste in (1.0, 2.0, 1e9):
                moves = scheduled(chosen, starts, plan.timeline.num_forward, link, haste)
                peak = without_moved(problem, plan.timeline, moves).peak_bytes
                waits = exposed_seconds(problem, moves, starts, link)
                every.append((peak, plan.again_seconds + waits))
    top, floor = planner.default.peak_bytes, planner.floor.peak_bytes
    assert floor == min(peak for peak, _ in every)
    step = start_times(problem, planner.default.timeline)[-1]
    for limit in range(floor, top + 1):
        best = min(seconds for peak, seconds in every if peak <= limit)
        found = planner.plan(limit).seconds
        # The whole search is exponential. The planner comes within a tenth of a step.
        assert found <= best + 0.1 * step, limit
        if best == 0:
            assert found == 0, limit


@pytest.mark.slow
def test_plans_are_monotone_in_budget(
    planner: Planner,
) -> None:
    top, floor = planner.default.peak_bytes, planner.floor.peak_bytes
    on_device = replace(planner, link=None)
    assert floor < on_device.floor.peak_bytes
    plans = [planner.plan(int(budget)) for budget in np.linspace(floor, top, 50)]
    for budget, plan in zip(np.linspace(floor, top, 50), plans, strict=True):
        assert plan.peak_bytes <= budget
        if budget >= on_device.floor.peak_bytes:
            assert plan.seconds <= on_device.plan(int(budget)).seconds
    for smaller, larger in itertools.pairwise(plans):
        assert smaller.seconds >= larger.seconds
        assert smaller.peak_bytes <= larger.peak_bytes
    assert plans[-1].moves == () and any(plan.moves for plan in plans)


def test_recomputes_where_cheaper_than_offload(planner: Planner) -> None:
    limit = (planner.default.peak_bytes + replace(planner, link=None).floor.peak_bytes) // 2
    plan = replace(planner, link=HostLink(1e5)).plan(limit)
    assert not plan.moves and plan.again_seconds > 0
    fast = replace(planner, link=HostLink(1e12, 0.0)).plan(limit)
    assert fast.moves and fast.seconds < plan.seconds


@pytest.mark.slow_cases
@pytest.mark.parametrize("budget", [0.0, 0.3, 0.7])
def test_offloaded_step_is_bit_identical_with_predicted_peak(budget: float) -> None:
    torch.manual_seed(0)
    net, x = Net(2), torch.randn(4, 64, 64)
    plain = run(net.forward, list(net.parameters()), x)
    plans: list[RematPlan] = []
    partitioner = RematPartitioner(budget, offload="host", on_plan=plans.append)
    step = compiled(net.forward, partitioner)
    for _ in range(2):
        found = run(step, list(net.parameters()), x)
        assert all(map(torch.equal, plain[0], found[0]))
    (plan,) = plans
    assert plan.moves and plan.host_bytes > 0
    module = _Calling(net, step)
    assert plan.peak_bytes == pytest.approx(
        measured_peak(module, x, loss=lambda loss: loss), rel=1e-4
    )


class _Calling(nn.Module):
    def __init__(self, net: nn.Module, step: Any) -> None:
        super().__init__()
        self.net, self.step = net, step

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.step(x)
        return result


class _Host:
    """The memory of copies on the host, whose bytes are counted apart from the device's."""

    uint8 = np.uint8

    def __init__(self) -> None:
        self.live = self.top = self.count = 0

    def empty(self, size: int, dtype: Any) -> np.ndarray[Any, Any]:
        memory = np.empty(size, dtype)
        self.live += size
        self.count += 1
        self.top = max(self.top, self.live)
        weakref.finalize(memory, self._free, size)
        return memory

    def _free(self, size: int) -> None:
        self.live -= size


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> _Host:
    counting = _Host()
    monkeypatch.setattr(offload_graph, "np", counting)
    return counting


@pytest.mark.slow
def test_host_bytes_match_plan(host: _Host) -> None:
    torch.manual_seed(0)
    net, x = Net(2), torch.randn(4, 64, 64)
    planned = transforms.remat(net, 0.2, offload="host")
    planned(x).backward()
    (report,) = planned.remat_reports()
    assert host.count == report.num_offloaded > 0
    assert host.top == report.host_bytes
    assert host.live == 0
    assert "moved to the host" in report.table()
    loss = planned(x)
    assert host.live == report.host_bytes
    del loss
    gc.collect()
    assert host.live == 0


@pytest.mark.slow
def test_error_in_either_pass_frees_host_memory(
    host: _Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x = Net(2), torch.randn(4, 64, 64)
    plain = run(net.forward, list(net.parameters()), x)
    planned = transforms.remat(net, 0.2, offload="host")
    planned(x).backward()
    count = host.count
    copied = offload_graph.OverlappedCopy.wait

    def failing_after(calls: int) -> Any:
        left = iter(range(calls))

        def wait(copy: offload_graph.OverlappedCopy) -> Tensor:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return copied(copy)

        return wait

    for calls in (2, count + 2):  # among the copies of the forward, and of the backward pass
        with monkeypatch.context() as patch:
            patch.setattr(offload_graph.OverlappedCopy, "__del__", lambda copy: None)
            patch.setattr(offload_graph.OverlappedCopy, "wait", failing_after(calls))
            with pytest.raises(KeyboardInterrupt):
                planned(x).backward()
        gc.collect()
        assert host.live == 0
        planned.zero_grad()
    found = run(planned, list(planned.parameters()), x)
    assert all(map(torch.equal, plain[0], found[0]))


def test_dropped_copy_is_waited_for() -> None:
    class Event:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    event = Event()
    copy = offload_graph.OverlappedCopy(torch.ones(2), torch.ones(2), event)
    del copy
    gc.collect()
    assert event.waits == 1
    copy = offload_graph.OverlappedCopy(torch.ones(2), torch.ones(2), event)
    copy.wait()
    del copy
    assert event.waits == 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(7) > 0,
        torch.randn(5, dtype=torch.complex64),
        torch.randn(3, 5).bfloat16(),
        torch.tensor(3),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_values_strides_and_dtypes_survive_round_trip(tensor: Tensor) -> None:
    there = offload_graph.start_to_host(tensor).wait()
    back = offload_graph.start_to_device(there, tensor.device).wait()
    assert torch.equal(back, tensor) and back.stride() == tensor.stride()
    assert back.dtype == tensor.dtype
    assert there.numel() == 0 or there.data_ptr() != tensor.data_ptr() != back.data_ptr()


class _Odd(nn.Module):
    """Views, several outputs, dropout, batch norm, and a result that is also kept."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.lin, self.out = nn.Linear(16, 64), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        a, b = nn.functional.dropout(self.lin(x), 0.1).chunk(2, -1)
        values, _ = (a.sigmoid() * b).sort(-1)
        h = values.exp().cumsum(1).tanh()
        return self.out(h), h


@pytest.mark.slow_cases
@pytest.mark.parametrize("budget", [0.0, 0.4])
def test_unusual_values_are_bit_identical(budget: float) -> None:
    torch.manual_seed(0)
    net, x = _Odd(), torch.randn(8, 3, 16, 16)
    torch._dynamo.reset()
    default = transforms.remat(net, 1.0)
    expected = run(default, list(default.parameters()), x)
    planned = transforms.remat(net, budget, offload="host")
    found = run(planned, list(planned.parameters()), x)
    assert planned.remat_reports()[0].num_offloaded
    assert all(map(torch.equal, expected[0], found[0]))
    assert torch.equal(expected[1], found[1])


@pytest.mark.slow
def test_batches_of_changing_sizes_share_a_plan() -> None:
    torch.manual_seed(0)
    net = Net(1)
    planned = transforms.remat(net, 0.2, offload="host")
    for size in (4, 6, 7, 5):
        x = torch.randn(size, 64, 64)
        plain = run(net.forward, list(net.parameters()), x)
        found = run(planned, list(planned.parameters()), x)
        assert all(map(torch.equal, plain[0], found[0]))
    assert len(planned.remat_reports()) == 2
    assert all(report.num_offloaded for report in planned.remat_reports())


def test_offload_plans_in_reports_drawings_and_hashes(planner: Planner) -> None:
    plan = planner.floor
    assert plan.moves
    assert plan.hash != replace(plan, moves=()).hash
    graph = plan.to_networkx()
    moved = [name for name, role in graph.nodes(data="role") if role == "offloaded"]
    assert len(moved) == len(plan.moves) == RematReport.of(plan).num_offloaded
    larger = planner.in_problem(plan, plan.problem)
    assert larger.peak_bytes == plan.peak_bytes


@pytest.mark.slow
def test_remat_plan_functions_with_host_link() -> None:
    torch.manual_seed(0)
    net, x = Net(2), torch.randn(4, 64, 64)
    plan = plan_remat(net, x, budget=0.0, offload=HostLink(1e9))
    assert plan.moves
    assert plan.peak_bytes < pareto_front(net, x)[-1].peak_bytes


@pytest.mark.slow
def test_plan_for_device_uses_its_host_link() -> None:
    with torch.device("meta"):
        net, x = Net(2), torch.randn(4, 64, 64)
    slow, fast = (
        plan_remat(net, x, budget=0.0, offload=link, device="cuda:h100")
        for link in (HostLink(1e6), "host")
    )
    described = plan_remat(
        net, x, budget=0.0, offload=described_link(GPUS["h100"]), device="cuda:h100"
    )
    assert fast.hash == described.hash != slow.hash
    assert link_of("cuda:h100") == described_link(GPUS["h100"])


def test_host_link_speed_of_gpu() -> None:
    assert described_link(GPUS["a100"]).bytes_per_second == pytest.approx(25.6e9)
    assert all(gpu.host_bytes_per_second < gpu.bytes_per_second / 10 for gpu in GPUS.values())


@pytest.mark.parametrize("offload", ["disk", True, 1, ("host",)])
def test_unknown_offload_target_is_an_error(offload: Any) -> None:
    with pytest.raises(ValueError, match=r"offload=.*Expected 'host'"):
        transforms.remat(Net(1), 0.5, offload=offload)


@pytest.mark.slow
def test_incompatible_offload_settings_are_an_error() -> None:
    with pytest.raises(ValueError, match="limits no bytes"):
        transforms.remat(Net(1), "min_cut", offload="host")
    compiled_module = transforms.compile(transforms.remat(Net(1), 0.5, offload="host"))
    with pytest.raises(ValueError, match="Inductor may reorder"):
        compiled_module(torch.randn(2, 8, 64))


def test_forward_outputs_are_not_offloaded(planner: Planner) -> None:
    plan = planner.default
    values = idle_values(plan.problem, plan.saved, plan.order, plan.timeline)
    assert all(isinstance(value, IdleValue) for value in values)
    outputs = set(plan.problem.base[list(plan.problem.forward_outputs)].tolist())
    assert not outputs & {value.node for value in values}
