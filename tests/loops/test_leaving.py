"""Attachments end in any order and after any error, and restore everything."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from lightning_unitscale import HFCallback, attach
from tests.fingerprint import difference, of_module, of_object, of_torch
from tests.helpers import assert_same_bits
from tests.loops.loops import Net, batches, new
from tests.loops.methods import METHODS


class Descent:
    """An optimizer that does not subclass torch's, whose ``step`` attachments replace."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    def step(self) -> None:
        with torch.no_grad():
            for param in self.params:
                param.sub_(0.01 * param.grad)


class Whole(nn.Module):
    """A module whose parts are attached as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x) * 1e-3)


def _fingerprint(model: nn.Module, *owners: Any) -> dict[Any, Any]:
    found = {**of_torch(), **of_module(model)}
    for index, owner in enumerate(owners):
        found |= {(index, name): value for name, value in of_object(owner).items()}
    return found


def _step(model: nn.Module, optimizer: Any, index: int) -> torch.Tensor:
    x, y = batches()[index]
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss


def _nested() -> tuple[Whole, Descent]:
    torch.manual_seed(1)
    model = Whole()
    return model, Descent(model.parameters())


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_attachments_end_in_any_order(order: tuple[int, ...]) -> None:
    """Attachments of a module and of its parts, with one optimizer."""
    results = []
    for is_attached in (False, True):
        model, optimizer = _nested()
        before = _fingerprint(model, optimizer)
        parts = [model, model.first, model.second] if is_attached else []
        attachments = [attach(part, optimizer, METHODS["both"]()) for part in parts]
        losses = [_step(model, optimizer, 0)]
        for count, index in enumerate(order):
            if is_attached:
                attachments[index].detach()
                attachments[index].detach()
            losses.append(_step(model, optimizer, count + 1))
            steps = [one.step_index for one in attachments]
            # Those that have not ended yet see every step.
            assert all(steps[other] == count + 2 for other in order[count + 1 :] if is_attached)
        assert difference(before, _fingerprint(model, optimizer)) == {}
        results.append((losses, model.state_dict()))
    assert_same_bits(*results)


@pytest.mark.slow_cases(4)
@pytest.mark.parametrize("how", ["both", "fp8", "monitor"])
@pytest.mark.parametrize("where", ["call", "loss", "backward", "optimizer", "loop"])
def test_error_inside_attachment_restores_model(how: str, where: str) -> None:
    """After an error in a function or a context, the callbacks can be used again."""
    model, optimizer = new()
    before = _fingerprint(model, optimizer)
    callbacks = METHODS[how]()

    def fail() -> None:
        raise torch.OutOfMemoryError("on purpose")

    def run() -> None:
        _step(model, optimizer, 0)
        x, y = batches()[1]
        if where == "call":
            hook = model.down.register_forward_pre_hook(lambda *_: fail())
            try:
                model(x)
            finally:
                hook.remove()
        loss = F.cross_entropy(model(x), y)
        if where == "loss":
            fail()
        if where == "backward":
            loss.register_hook(lambda _: fail())
        loss.backward()
        if where == "optimizer":
            hook = optimizer.register_step_pre_hook(lambda *_: fail())
            try:
                optimizer.step()
            finally:
                hook.remove()
        fail()

    with pytest.raises(torch.OutOfMemoryError), attach(model, optimizer, callbacks):
        run()
    assert difference(before, _fingerprint(model, optimizer)) == {}
    attachment = attach(model, optimizer, callbacks)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            run()
    finally:
        attachment.detach()
    assert difference(before, _fingerprint(model, optimizer)) == {}
    if how == "fp8":
        return
    results = []
    for again in ([], callbacks):
        model, optimizer = new()
        with attach(model, optimizer, again):
            results.append([_step(model, optimizer, index) for index in range(3)])
    assert_same_bits(*results)


class _Refusing(type(METHODS["monitor"]()[0])):  # type: ignore[misc]
    """A monitor whose start fails when it has begun."""

    def start(self, loop: Any) -> None:
        super().start(loop)
        self.begin_batch()
        raise LookupError


def test_failed_attach_restores_model() -> None:
    model, optimizer = new()
    before = _fingerprint(model, optimizer)
    with pytest.raises(LookupError):
        attach(model, optimizer, [*METHODS["lossless"](), _Refusing(1)])
    with attach(model, optimizer, METHODS["lossless"]()) as attachment:
        with pytest.raises(LookupError):
            attachment.add(_Refusing(1))
        assert len(attachment.callbacks) == 1
        _step(model, optimizer, 0)
    assert difference(before, _fingerprint(model, optimizer)) == {}


def test_later_wrapper_of_forward_is_kept() -> None:
    """Some packages wrap ``forward`` after the callbacks are attached."""
    model, optimizer = new()
    attachment = attach(model, optimizer, METHODS["both"]())
    ours = model.forward
    model.forward = lambda x: ours(x)  # type: ignore[method-assign]
    theirs = model.forward
    attachment.detach()
    assert vars(model)["forward"] is theirs
    plain, _ = new()
    x = batches()[0][0]
    assert_same_bits(model.eval()(x), plain.eval()(x))
    # Nothing of it is an attachment any more.
    with attach(model, optimizer, METHODS["both"]()):
        _step(model.train(), optimizer, 0)
    assert vars(model)["forward"] is theirs
    of_torch()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_fabric_attachments_end_in_any_order(order: tuple[int, int]) -> None:
    callbacks = METHODS["both"]()
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=callbacks)
    fabric.launch()
    models = [new(seed)[0] for seed in (1, 2)]
    before = [_fingerprint(model) for model in models]
    set_up = [fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    wrappers = [wrapper for wrapper, _ in set_up]
    x, y = batches()[0]
    with pytest.raises(LookupError):
        for wrapper, optimizer in set_up:
            fabric.backward(F.cross_entropy(wrapper(x), y))
            optimizer.step()
            wrapper.mark_forward_method("extra_repr")
        raise LookupError
    for index in order:
        attachment = callbacks[0].attachments[index]
        attachment.detach()
        assert "mark_forward_method" not in vars(wrappers[index])
    for model, fingerprint in zip(models, before, strict=True):
        changed = difference(fingerprint, _fingerprint(model))
        # Attributes that Fabric has set are Fabric's.
        assert not [name for name in changed if "forward" in name or "hook" in name]


@pytest.mark.slow_cases(4)
@pytest.mark.parametrize("where", ["data", "step", "callback"])
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_hugging_face_error_restores_model(
    where: str, error: type[BaseException], tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    is_failing = True

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            if is_failing and where == "data" and index == 9:
                raise error
            return {"x": torch.full((16,), float(index)), "labels": torch.tensor(index)}

    class Model(Net):
        def forward(self, x: Any, labels: Any) -> Any:  # type: ignore[override]
            if is_failing and where == "step" and any(labels == 9):
                raise error
            return {"loss": F.cross_entropy(super().forward(x), labels)}

    class Callback(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if is_failing and where == "callback" and state.global_step == 2:
                raise error

    results = []
    for callbacks in ([], [HFCallback(METHODS["both"]())]):
        torch.manual_seed(0)
        is_failing, model = True, Model()
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=str(tmp_path),
                max_steps=4,
                per_device_train_batch_size=4,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=Rows(),
            callbacks=[*callbacks, Callback()],
        )
        before = _fingerprint(model)
        with pytest.raises(error):
            trainer.train()
        changed = difference(before, _fingerprint(model))
        # Accelerate sets its attributes on the model without callbacks as well.
        assert "forward" not in vars(model)
        is_failing = False
        trainer.train()
        results.append((sorted(changed), model.state_dict()))
    assert_same_bits(*results)
