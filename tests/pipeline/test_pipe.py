"""Cutting a module: what is in which stage, the same bits in one process, and errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.pipelining
import torch.nn.functional as F
from torch import Tensor, fx, nn

pytest.importorskip("transformers")

from lightning_unitscale.pipeline import (
    Pipe,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    balanced_split,
    pipe_split,
    pipeline,
)
from lightning_unitscale.pipeline.stage import retarget
from tests.pipeline.models import MODELS, Odd

LEFT_OUT = "ignore:.*the pipeline does not return them:UserWarning"
pytestmark = pytest.mark.filterwarnings(
    LEFT_OUT,
    # Warnings of other packages while a model is traced.
    "ignore:Dynamo detected a call to a `functools.lru_cache`",
    "ignore:To copy construct from a tensor",
    "ignore:<enum '.*'> is an Enum subclass",
)


def _loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    module.zero_grad()
    loss.backward()
    return {name: one.grad for name, one in module.named_parameters()}


def _assert_same(module: nn.Module, pipe: Pipe, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(3)
    expected = module(**kwargs)
    gradients = _gradients(module, _loss(expected))
    torch.manual_seed(3)
    found = pipe(**kwargs)
    assert type(found) is type(expected)
    assert torch.equal(_loss(found), _loss(expected))
    for name, one in _gradients(module, _loss(found)).items():
        other = gradients[name]
        assert (one is None) == (other is None), name
        assert one is None or other is None or torch.equal(one, other), name


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", MODELS)
def test_pipe_is_bit_identical_in_one_process(name: str) -> None:
    case = MODELS[name]()
    kwargs = case.kwargs()
    pipe = pipeline(case.module, (), kwargs, split_spec=case.spec(4))
    assert pipe.num_stages == 4
    _assert_same(case.module, pipe, kwargs)
    assert pipe.state_dict().keys() == case.module.state_dict().keys()
    own = dict(case.module.named_parameters())
    assert all(own[name] is one for name, one in pipe.named_parameters())
    assert bool(pipe.info().shared_parameters) == case.tied
    assert "stage" in str(pipe.info())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT", "T5"])
def test_stages_survive_pickle_and_deepcopy(name: str) -> None:
    case = MODELS[name]()
    kwargs = case.kwargs()
    pipe = pipeline(case.module, (), kwargs, split_spec=case.spec(4))
    expected = _loss(pipe(**kwargs))
    flat = pipe.program.flatten((), kwargs)
    for send in (lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy):
        values: tuple[Any, ...] = ()
        for stage in pipe.stages:
            sent = send(stage)
            assert sent.info == stage.info
            assert sent.state_dict().keys() == stage.state_dict().keys()
            mine = {one.data_ptr() for one in stage.parameters()}
            assert not mine & {one.data_ptr() for one in sent.parameters()}
            values = sent(*values, *(flat[place] for place in sent.info.inputs))
        assert pipe.program.loss is not None
        assert torch.equal(values[pipe.program.loss], expected)


def test_stage_info_has_inputs_and_parameters() -> None:
    case = MODELS["Odd"]()
    info = pipeline(case.module, (), case.kwargs(), split_spec=case.spec(4)).info()
    assert [one.parameters for one in info.stages] == [
        ("frozen.bias", "frozen.weight"),
        ("embedding.weight", "first.bias", "first.weight", "never.bias", "never.weight"),
        ("second.bias", "second.weight"),
        ("last.bias", "last.weight", "third.bias", "third.weight"),
    ]
    assert [one.buffers for one in info.stages] == [(), ("offset", "scale"), (), ()]
    # Arguments are read where they are needed, and the mask is made again rather than sent.
    assert [one.input_names for one in info.stages] == [("x",), ("kinds",), (), ("pairs[0]",)]
    assert info.stages[2].recomputed == ("arange", "lt")
    # Nothing differentiable leaves the frozen layer; the embedding passes through stage 2.
    assert [one.feeds_loss for one in info.stages[0].sent] == [False]


def test_split_marks_in_code_and_sequential() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            pipe_split()
            return self.second(y)

    x = torch.randn(5, 3)
    module = Marked()
    pipe = pipeline(module, x)
    assert pipe.num_stages == 2
    assert torch.equal(pipe(x), module(x))
    assert [name for name, _ in pipe.get_stage_module(1).named_parameters()] == [
        "second.weight",
        "second.bias",
    ]
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    handles = annotate_split_points(plain, {"0": SplitPoint.END, "2": SplitPoint.BEGINNING})
    assert pipeline(plain, (x,)).num_stages == 3
    for one in handles:
        one.remove()
    with pytest.raises(ValueError, match="there are no cuts"):
        pipeline(plain, (x,))


class _TorchMark(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch.distributed.pipelining.pipe_split()
        return self.second(y)


def _cut_before_last(target: Callable[[], None]) -> Callable[[fx.GraphModule], fx.GraphModule]:
    def policy(graph_module: fx.GraphModule) -> fx.GraphModule:
        last = graph_module.graph.output_node().prev
        with graph_module.graph.inserting_before(last):
            graph_module.graph.call_function(target)
        return graph_module

    return policy


def test_torch_split_marks_are_accepted() -> None:
    x = torch.randn(5, 3)
    module = _TorchMark()
    pipe = pipeline(module, x)
    assert pipe.num_stages == 2
    assert torch.equal(pipe(x), module(x))
    plain = nn.Sequential(module.first, module.second)
    edge = torch.distributed.pipelining.SplitPoint.END
    assert pipeline(plain, x, split_spec={"0": edge}).num_stages == 2
    for target in (pipe_split, torch.distributed.pipelining.pipe_split):
        pipe = pipeline(plain, x, split_policy=_cut_before_last(target))
        assert pipe.num_stages == 2
        assert torch.equal(pipe(x), plain(x))


def test_policy_without_cuts_is_an_error() -> None:
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    with pytest.raises(ValueError, match="put no cut into the graph"):
        pipeline(module, x, split_policy=lambda graph_module: graph_module)


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        y = self.second(hidden)
        return {"hidden": hidden, "both": (y, (y**2).mean()), "loss2": y.abs().mean()}


def test_loss_is_found_by_loss_spec() -> None:
    x = torch.randn(5, 3)
    cut = {"second": SplitPoint.BEGINNING}

    def found(module: nn.Module, *args: Any, **options: Any) -> int | None:
        spec = options.pop("split_spec", cut)
        return pipeline(module, args, split_spec=spec, **options).program.loss

    assert found(Outputs(), x) is None
    assert found(Outputs(), x, loss_spec="loss2") == 3
    spec = {"hidden": False, "both": (False, True), "loss2": False}
    assert found(Outputs(), x, loss_spec=spec) == 2
    wrapped = TrivialLossWrapper(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), F.mse_loss)
    cuts = {"module.1": SplitPoint.BEGINNING}
    assert found(wrapped, x, x, split_spec=cuts) == 0
    with pytest.raises(ValueError, match=r"0 outputs have this key"):
        found(Outputs(), x, loss_spec="los")
    with pytest.raises(ValueError, match="is not a tensor of one element"):
        found(Outputs(), x, loss_spec="hidden")
    with pytest.raises(ValueError, match="marks 2 of the 4 outputs"):
        found(Outputs(), x, loss_spec={"hidden": False, "both": True, "loss2": False})


class Modes(nn.Module):
    """Cuts inside an autocast region and inside ``no_grad``, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
            pipe_split()
            y = self.second(F.dropout(y, 0.5))
        with torch.no_grad():
            shift = y.float().mean() + torch.rand(4)
            pipe_split()
            shift = shift * 2
        return self.third(y.float() + shift).mean()


def test_autocast_and_grad_modes_span_cuts() -> None:
    module, x = Modes(), torch.randn(3, 4)
    pipe = pipeline(module, x)
    assert pipe.num_stages == 3
    torch.manual_seed(0)
    expected = module(x)
    gradients = _gradients(module, expected)
    torch.manual_seed(0)
    found = pipe(x)
    assert torch.equal(found, expected)
    assert all(torch.equal(g, gradients[n]) for n, g in _gradients(module, found).items())
    assert not torch.is_autocast_enabled("cpu")
    assert pipe.info().stages[0].sent[0].tensor.dtype is torch.bfloat16
    # The end of the captured no_grad does not switch the caller's own off.
    with torch.no_grad():
        assert not pipe(x).requires_grad
        assert not torch.is_grad_enabled()


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        table = torch.zeros(3, 4)
        table[0] = y[0]
        pipe_split()
        table[1] = y[1]
        self.calls.add_(1)
        return (self.second(y) + table).square().mean()


def test_mutations_stay_in_one_stage() -> None:
    module, x = Writes(), torch.randn(3, 4)
    pipe = pipeline(module, x)
    expected = module(x)
    gradients = _gradients(module, expected)
    found = pipe(x)
    assert torch.equal(found, expected)
    assert all(torch.equal(g, gradients[n]) for n, g in _gradients(module, found).items())
    # The buffer is the module's own.
    assert module.calls == 2


def test_operations_use_device_of_their_stage() -> None:
    module = MODELS["Odd"]()
    pipe = pipeline(module.module, (), module.kwargs(), split_spec=module.spec(4))
    graph = copy.deepcopy(pipe.get_stage_module(2)).graph
    retarget(graph, torch.device("meta"))
    devices = [node.kwargs["device"] for node in graph.nodes if "device" in node.kwargs]
    assert devices == [torch.device("meta")]


def test_balanced_split_balances_costs() -> None:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 1024))
    x = torch.randn(64, 256)
    info = pipeline(module, x, split_policy=balanced_split(2)).info()
    # Ten layers' worth of work, of which the last layer is four.
    assert len(info.stages[0].parameters) == 10
    assert len(info.stages[1].parameters) == 4
    assert pipeline(module, x, split_policy=balanced_split(1)).num_stages == 1
    with pytest.raises(ValueError, match="num_stages=9"):
        pipeline(module, x, split_policy=balanced_split(9))
    with pytest.raises(ValueError, match="num_stages=0"):
        balanced_split(0)


def test_bad_split_arguments_are_an_error() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    cut = {"1": SplitPoint.BEGINNING}
    with pytest.raises(ValueError, match=r"no submodule 'layers\.7'"):
        pipeline(module, x, split_spec={"layers.7": SplitPoint.END})
    with pytest.raises(TypeError, match="Expected SplitPoint"):
        pipeline(module, x, split_spec={"1": "end"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="Expected one of them"):
        pipeline(module, x, split_spec=cut, split_policy=balanced_split(2))
    with pytest.raises(ValueError, match="there are no cuts"):
        pipeline(module, x)
    with pytest.raises(ValueError, match="stage 0 of 2 would be empty"):
        pipeline(module, x, split_spec={"0": SplitPoint.BEGINNING})
    assert not module[1]._forward_pre_hooks
    pipe = pipeline(module, x, split_spec=cut)
    for index in (-1, 2, "0"):
        with pytest.raises(ValueError, match="the pipeline has 2 stages"):
            pipe.get_stage_module(index)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"input: a tensor float32\[4, 3\]"):
        pipe(torch.randn(4, 3))
    with pytest.raises(ValueError, match="do not match the example"):
        pipe(x, x)
    with pytest.raises(ValueError, match=r"captured for 2\.0"):
        odd = Odd()
        kwargs = MODELS["Odd"]().kwargs()
        staged = pipeline(odd, (), kwargs, split_spec={"third": SplitPoint.BEGINNING})
        staged(**{**kwargs, "pairs": (kwargs["pairs"][0], 3.0)})
    with pytest.raises(RuntimeError, match="cannot be captured as one graph"):
        pipeline(_Branching(), x, split_policy=balanced_split(2))


class _Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x
