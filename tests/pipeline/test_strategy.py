"""PipelineStrategy on two CPU processes: training, checkpoints and logs of one device."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_unitscale.pipeline.program import split_evenly
from lightning_unitscale.pipeline.whole_batch import joined
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import codes_of_ranks, run_ranks
from tests.pipeline.pipeline_run import Groups, Recorder, _points

NUM_RANKS = 2
CASES = ["gpt", "gpt-v", "groups", "changes", "branches", "branches-v"]
KEPT = "gpt-kept"
MIXED = "bf16"


class Runs:
    """Folders in which the same cases were trained on one device and on two."""

    def __init__(self, root: Path) -> None:
        self.folders = {(n, s): root / f"{n}-{s}" for n in (1, NUM_RANKS) for s in ("first", "on")}
        for one in self.folders.values():
            one.mkdir()
        # Each resumes from what the other has saved.
        # One device has nothing to free.
        cases = {1: [*CASES, MIXED], NUM_RANKS: [*CASES, MIXED, KEPT]}
        self._run("first", {n: ("-", names) for n, names in cases.items()})
        saved = {n: str(self.folders[n, "first"]) for n in (1, NUM_RANKS)}
        self._run("on", {1: (saved[NUM_RANKS], ["resumed"]), NUM_RANKS: (saved[1], ["resumed"])})

    def found(self, num_ranks: int, case: str, rank: int = 0) -> dict[str, Any]:
        """Return the results of a rank."""
        folder = self.folders[num_ranks, "on" if case == "resumed" else "first"]
        return torch.load(folder / f"{case}-{rank}.pt", weights_only=False)

    def checkpoint(self, num_ranks: int, case: str) -> dict[str, Any]:
        """The checkpoint at the end."""
        folder = self.folders[num_ranks, "on" if case == "resumed" else "first"]
        return torch.load(folder / f"{case}.ckpt", weights_only=False)

    def _run(self, stage: str, given: dict[int, tuple[str, list[str]]]) -> None:
        with ThreadPoolExecutor() as pool:
            running = [
                pool.submit(
                    run_ranks,
                    "tests.pipeline.pipeline_run",
                    self.folders[num_ranks, stage],
                    *(str(num_ranks), resume_from, *cases),
                    num_ranks=num_ranks,
                    timeout=500,
                )
                for num_ranks, (resume_from, cases) in given.items()
            ]
            for one in running:
                one.result()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All trainings."""
    return Runs(tmp_path_factory.mktemp("pipeline"))


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # An optimizer that divides by a gradient's size makes much of the last bits of a small one.
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.parametrize("case", [*CASES, "resumed"])
def test_training_matches_one_device(case: str, runs: Runs) -> None:
    expected = runs.found(1, case)
    for rank in range(NUM_RANKS):
        found = runs.found(NUM_RANKS, case, rank)
        assert found["step"] == expected["step"]
        assert found["attributes"] == expected["attributes"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["metrics"].keys() == expected["metrics"].keys()
        for name, one in found["metrics"].items():
            assert one.item() == pytest.approx(expected["metrics"][name].item(), rel=1e-5), name
        assert found["weights"].keys() == expected["weights"].keys()
        for name, one in found["weights"].items():
            _assert_close(one, expected["weights"][name])


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.parametrize("case", [*CASES, "resumed", "gpt-step=5"])
def test_checkpoint_matches_one_device(case: str, runs: Runs) -> None:
    expected, found = runs.checkpoint(1, case), runs.checkpoint(NUM_RANKS, case)
    assert found.keys() == expected.keys()
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    assert found["lr_schedulers"] == expected["lr_schedulers"]
    for ours, theirs in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for index, state in ours["state"].items():
            assert state.keys() == theirs["state"][index].keys()
            for name, one in state.items():
                _assert_close(one, theirs["state"][index][name])


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_memory_of_other_ranks_parameters_is_freed(runs: Runs) -> None:
    """Parameters, gradients and the state of AdamW, after every step."""
    for case in CASES:
        found = [runs.found(NUM_RANKS, case, rank)["memory"] for rank in range(NUM_RANKS)]
        (whole,) = {one["whole"] for one in found}
        for rank in range(NUM_RANKS):
            ran_with = runs.found(NUM_RANKS, case, rank)["ran with"]
            # Steps of which only forward is captured free in the end: their code reads weights.
            assert (ran_with[0] < whole) == (not case.startswith("branches"))
            if case in {"gpt", "gpt-v"}:
                assert set(ran_with) == {found[rank]["owned"]}
        for one in found:
            assert 0 < one["owned"] < 0.85 * whole
            assert one["parameters"][0] == whole, "all are there until the first step is cut"
            # Parameters that no step has used yet stay on every rank.
            unused = 4 * (8 * 8 + 8) if case in {"groups", "branches", "branches-v"} else 0
            used = one["parameters"][4 if case == "changes" else 1 :]
            assert max(used) <= 1.05 * one["owned"] + unused
            assert max(one["gradients"]) <= 1.05 * one["owned"]
            # Two moments, and a number of steps for each parameter.
            assert max(one["optimizer"]) <= 1.05 * (2 * one["owned"] + 4 * one["num_owned"])
            # Validation runs through the same stages, and needs no other weights.
            assert max(one["validated"]) <= 1.05 * one["owned"] + unused
            assert one["reads"] == {"the values of this parameter are on another rank"}
        tied = sum(one["owned"] for one in found) - whole
        assert (tied > 0) == (case == "gpt")
    for rank in range(NUM_RANKS):
        kept = runs.found(NUM_RANKS, KEPT, rank)["memory"]
        assert set(kept["parameters"]) == {kept["whole"]}
        assert kept["reads"] == set()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_freeing_memory_changes_no_result(runs: Runs) -> None:
    found, kept = runs.found(NUM_RANKS, "gpt"), runs.found(NUM_RANKS, KEPT)
    assert found["losses"] == kept["losses"]
    assert found["metrics"] == kept["metrics"]
    for name, one in found["weights"].items():
        assert torch.equal(one, kept["weights"][name])


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_mixed_precision_is_close_to_one_device(runs: Runs) -> None:
    """The gradients of microbatches are rounded one by one."""
    found, expected = runs.found(NUM_RANKS, MIXED)["losses"], runs.found(1, MIXED)["losses"]
    assert found == pytest.approx(expected, rel=2e-3)
    assert found != pytest.approx(runs.found(1, "groups")["losses"][: len(found)], rel=2e-3)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_runs_resume_each_others_checkpoints(runs: Runs) -> None:
    """The resumed runs were given each other's checkpoints and agree with a longer first run."""
    first = runs.found(1, "gpt")["losses"]
    assert len(runs.found(1, "resumed")["losses"]) == len(first)
    assert runs.found(NUM_RANKS, "resumed")["step"] == 2 * len(first)
    assert runs.found(NUM_RANKS, "resumed")["losses"][0] != first[0]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("killed", -signal.SIGKILL), ("raises", 1)])
def test_failure_of_one_rank_ends_all(how: str, code: int, tmp_path: Path) -> None:
    codes, outputs = codes_of_ranks(
        "tests.pipeline.pipeline_run", tmp_path, "2", "-", how, timeout=120
    )
    # The first rank does not wait for the timeout, and saves nothing with weights missing.
    assert codes == [1, code]
    assert "Connection" in outputs[0]
    assert how == "killed" or "KeyError: 'of the second rank'" in outputs[1]
    assert not list(tmp_path.glob("*.ckpt"))


def _loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(_points(), batch_size=16)


def test_one_rank_matches_default_strategy(one_rank: dict[str, Any]) -> None:
    losses = []
    for strategy in ("auto", PipelineStrategy("GPipe", num_microbatches=2)):
        pl.seed_everything(1, verbose=False)
        recorder = Recorder()
        module = Groups()
        trainer = pl.Trainer(strategy=strategy, callbacks=[recorder], **one_rank)
        trainer.fit(module, _loader(), _loader())
        losses.append(recorder.losses)
        assert "training_step" not in module.__dict__
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class Order(pl.Callback):
    """Keeps the first number of every batch."""

    def __init__(self) -> None:
        self.firsts: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.firsts.append(batch[0][0, 0].item())


@pytest.mark.slow_cases
@pytest.mark.parametrize("shuffle", [False, True])
def test_data_are_shuffled_like_the_loader(shuffle: bool, one_rank: dict[str, Any]) -> None:
    order = Order()
    trainer = pl.Trainer(
        strategy=PipelineStrategy("GPipe", num_microbatches=2),
        callbacks=[order],
        **{**one_rank, "use_distributed_sampler": True},
    )
    data = _points()
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=shuffle)
    trainer.fit(Groups(), loader, _loader())
    in_order = [data[place][0][0].item() for place in range(0, 64, 16)]
    assert (order.firsts == in_order) is not shuffle
    assert "_prepare_dataloader" not in vars(trainer._data_connector)


pytestmark = pytest.mark.filterwarnings(
    # Every rank logs the same values.
    "ignore:It is recommended to use `self.log:UserWarning"
)


class Manual(Groups):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Normalized(Groups):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(8))


class Sharded(Groups):
    def configure_model(self) -> None:
        fully_shard(self.head, mesh=init_device_mesh("cpu", (1,)))


class Noisy(Groups):
    """Reads its loss, draws random numbers, and checks what forward computes from them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noisy = batch[0] + torch.randn_like(batch[0])
        logits = self(noisy)
        assert torch.allclose(logits, self.head(self.net(noisy)), atol=1e-6)
        loss = F.cross_entropy(logits, batch[1])
        return loss * 2 if loss.item() > 0 else loss


class Changed(Noisy):
    """Writes into a parameter before it calls forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.never.weight.mul_(0.5)
        return super().training_step(batch, batch_idx)


class Embeds(Noisy):
    """Calls forward with a value that depends on a parameter."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(self.never(batch[0])), batch[1])


class Twice(Noisy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]) + self(batch[0] + 1), batch[1])


class Counts(Noisy):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return F.cross_entropy(self(batch[0] + self.calls), batch[1])


class Halves(Noisy):
    """Calls two modules, and neither has more than half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.head(self.second(self.net(batch[0]))), batch[1])


class Logs(Noisy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("layer", nn.Identity())
        return F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("module", "size", "error", "match"),
    [
        (Manual, 16, MisconfigurationException, "automatic_optimization=False"),
        (Normalized, 16, MisconfigurationException, "net.4 takes its statistics"),
        (Sharded, 16, MisconfigurationException, "head.weight is a DTensor"),
        (Groups, 5, ValueError, "a batch of 5 samples cannot be divided"),
    ],
)
def test_unpipelinable_module_is_an_error(
    module: type[pl.LightningModule],
    size: int,
    error: type[Exception],
    match: str,
    one_rank: dict[str, Any],
) -> None:
    made = module()
    trainer = pl.Trainer(strategy=PipelineStrategy("GPipe", num_microbatches=2), **one_rank)
    with pytest.raises(error, match=match):
        trainer.fit(made, torch.utils.data.DataLoader(_points(), batch_size=size), _loader())
    assert "training_step" not in made.__dict__


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    ("module", "capture", "match"),
    [
        (Noisy, "step", "is not one graph for every microbatch"),
        (Changed, "forward", "changes parameters or buffers before it calls self,"),
        (Embeds, "forward", "with a tensor that needs a gradient"),
        (Twice, "forward", "more than once"),
        (Counts, "forward", "with other arguments the second time"),
        (Halves, "forward", "calls no module that has most of its parameters"),
        (Logs, "forward", "Log tensors, numbers and metrics only"),
    ],
)
def test_uncapturable_module_is_an_error(
    module: type[pl.LightningModule], capture: str, match: str, one_rank: dict[str, Any]
) -> None:
    strategy = PipelineStrategy("GPipe", num_microbatches=2, capture=capture)
    made = module()
    with pytest.raises(RuntimeError, match=match):
        pl.Trainer(strategy=strategy, **one_rank).fit(made, _loader(), _loader())
    assert not {"training_step", "forward", "log"} & made.__dict__.keys()


class Keeper:
    """An object outside the module that the step changes."""

    def __init__(self) -> None:
        self.count = 0


class CountsAndUsesParts(Groups):
    """Counts its calls, here and in an object of its own class, and does not call ``forward``."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.keeper.count += 1
        return F.cross_entropy(self.head(self.net(batch[0])), batch[1])


@pytest.mark.slow
def test_side_effects_of_step_happen_once_per_batch(
    one_rank: dict[str, Any],
) -> None:
    module = CountsAndUsesParts()
    strategy = PipelineStrategy("GPipe", num_microbatches=2, capture="step")
    pl.Trainer(strategy=strategy, **one_rank).fit(module, _loader(), _loader())
    assert module.count == module.keeper.count == module.global_step > 1


class PrintsAndUsesHalves(Halves):
    """Can be a pipeline neither as a whole nor by one module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print("a graph break")
        return super().training_step(batch, batch_idx)


class PrintsAndCompares(Noisy):
    """Calls one module, which compares all samples with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = Towers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print("a graph break")
        return F.cross_entropy(self.towers(batch[0]), torch.arange(len(batch[0])))


_LOCK = threading.Lock()


class Installs(Noisy):
    """Calls a module that sets itself up in its first call, under a lock, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Locked(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.head(self.net(batch[0])), batch[1])


class Locked(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.is_installed = False
        self.register_buffer("count", torch.zeros(()))

    def forward(self, points: torch.Tensor) -> Any:
        if not self.is_installed:
            with _LOCK:
                self.is_installed = True
        self.count += 1
        return self.net(points)


@pytest.mark.parametrize("capture", ["step", "forward"])
def test_module_with_setup_in_first_call(capture: str, one_rank: dict[str, Any]) -> None:
    module, plain = Installs(), Installs()
    plain.load_state_dict(module.state_dict())
    recorders = [Recorder(), Recorder()]
    strategy = PipelineStrategy("GPipe", num_microbatches=1, capture=capture)
    for each, recorder, options in (
        (module, recorders[0], one_rank | {"strategy": strategy}),
        (plain, recorders[1], one_rank),
    ):
        pl.Trainer(callbacks=[recorder], **options).fit(each, _loader(), _loader())
    assert recorders[0].losses == pytest.approx(recorders[1].losses, rel=1e-6)
    # The first call counted nothing.
    assert module.net.count == plain.net.count == module.global_step


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 32) for _ in range(2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.first(points) @ self.second(points).T


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (PrintsAndUsesHalves, r"`print`.*Besides, .*calls no module that has most"),
        (PrintsAndCompares, r"`print`.*towers\..* compares each sample.*Besides, .*calls no"),
    ],
)
def test_error_if_neither_step_nor_module_can_be_pipelined(
    module: type[pl.LightningModule], match: str, one_rank: dict[str, Any]
) -> None:
    trainer = pl.Trainer(strategy=PipelineStrategy("GPipe", num_microbatches=2), **one_rank)
    with (
        pytest.warns(UserWarning, match="only the module that the step calls runs as a pipeline"),
        pytest.raises(RuntimeError, match=match),
    ):
        trainer.fit(module(), _loader(), _loader())


def test_step_with_graph_break_pipelines_only_forward(one_rank: dict[str, Any]) -> None:
    recorder = Recorder()
    module = Noisy()
    before = module.head.weight.detach().clone()
    strategy = PipelineStrategy("GPipe", num_microbatches=2)
    trainer = pl.Trainer(strategy=strategy, callbacks=[recorder], **one_rank)
    with pytest.warns(
        UserWarning,
        match="the module that the step calls .* is not one graph",
    ):
        trainer.fit(module, _loader(), _loader())
    assert len(recorder.losses) == 4
    assert not torch.equal(module.head.weight, before)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capture": "loss"}, "capture='loss'"),
        ({"schedule": "2F2B"}, "schedule='2F2B'"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"stages_per_rank": "many"}, "stages_per_rank='many'"),
        ({"split": "even"}, "split='even'"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_bad_strategy_arguments_are_an_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PipelineStrategy(**{"num_microbatches": 2, **options})


def test_strategy_is_registered_by_name() -> None:
    assert isinstance(StrategyRegistry.get("pipeline"), PipelineStrategy)


def test_microbatch_results_are_joined() -> None:
    batch = {"x": torch.arange(6.0), "mask": torch.ones(2), "name": "a"}
    parts = split_evenly(batch, 3)
    assert [one["x"].tolist() for one in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(one["mask"] is batch["mask"] and one["name"] == "a" for one in parts)
    results = [[one["x"], one["x"].mean(), torch.tensor(2), None] for one in parts]
    whole = [joined(each, None) for each in zip(*results, strict=True)]
    assert torch.equal(whole[0], batch["x"])
    assert whole[1] == 2.5
    assert whole[2] == 6
    assert whole[3] is None
    with pytest.raises(ValueError, match="num_microbatches=4: a batch of 6"):
        split_evenly(batch, 4)
