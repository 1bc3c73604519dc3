"""Attach callbacks to a module in any training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

from torch import nn

from lightning_unitscale.arguments import check_instance, checked_folder, shown
from lightning_unitscale.loops import called_loop
from lightning_unitscale.loops.loop import LoopCallback, given_callbacks
from lightning_unitscale.loops.ranks import UNEVEN
from lightning_unitscale.patching import Replacement, shadowed


def attach(
    module: nn.Module,
    optimizer: Any = None,
    callbacks: LoopCallback | Iterable[LoopCallback] = (),
    *,
    methods: str | Iterable[str] = (),
    log_dir: str | Path | None = None,
    loggers: Any = (),
    scaler: Any = None,
) -> Attachment:
    """Attach callbacks to a module in a training loop of any kind.

    A training step consists of the module's calls in training mode and their backward passes. It
    ends when an optimizer with parameters of the module steps. Calls by the step's closure belong
    to that step. Calls in evaluation mode or without gradients are an evaluation. If a loop
    trains the module in evaluation mode, its calls with gradients count as training after the first
    step of the optimizer. You do not have to change your loop.

    Args:
        module: The module that the loop calls: after ``DistributedDataParallel``, ``fully_shard``
            or ``accelerator.prepare``.
        optimizer: One or several optimizers whose steps end a training step. By default every
            ``torch.optim.Optimizer`` with a parameter of the module; pass others explicitly.
        callbacks: One or several: ``UnitScaleCallback`` at the dispatcher (lossless, simulated
            formats, FP8), ``ScaleMonitor``.
        methods: Names of other methods that the loop calls. These calls count as calls of the
            module. The steps of a LightningModule are always included.
        log_dir: Folder of TensorBoard's event files for ``ScaleMonitor``.
        loggers: One or several more loggers for ``ScaleMonitor``: of Lightning or Fabric, a
            ``SummaryWriter``, a run of W&B, Trackio or MLflow.
        scaler: The ``GradScaler`` that multiplies the loss, if there is one.

    Returns:
        The attachment: a context, and a handle with ``detach()``, ``state_dict()`` and
        ``load_state_dict()``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a callback needs a Lightning Trainer, two callbacks set the same option, or
            ``log_dir`` cannot be written.

    Examples:
        >>> from lightning_unitscale import UnitScaleCallback, attach
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with attach(model, optimizer, callbacks=[UnitScaleCallback()]):
        ...     for batch in torch.randn(3, 4, 8):
        ...         model(batch).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    return Attachment(module, optimizer, callbacks, methods, log_dir, loggers, scaler)


class Attachment(called_loop.CalledLoop):
    """The callbacks on a module. :func:`attach` returns it, with the same arguments.

    Attributes:
        should_stop: Whether a callback has requested the end of the training.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        callbacks: LoopCallback | Iterable[LoopCallback],
        methods: str | Iterable[str] = (),
        log_dir: str | Path | None = None,
        loggers: Any = (),
        scaler: Any = None,
    ) -> None:
        expected = "the torch.nn.Module that is trained"
        check_instance("module", module, nn.Module, expected, "pass the model itself")
        if called_loop.attachment_of(called_loop.unwrapped(module)) is not None:
            raise ValueError(
                f"module={type(module).__name__}: callbacks are attached to it already. Expected "
                "all of them in one call. Pass them together, or detach() the others first."
            )
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(
                f"scaler={shown(scaler)}: not a gradient scaler. Expected a torch.amp.GradScaler. "
                "Leave it out if the loss is not scaled."
            )
        super().__init__(module, optimizer, methods, log_dir, loggers)
        self.scaler = scaler
        # Undone at the end, the calls of the module first.
        self._attached, self._forward = ExitStack(), ExitStack()
        with ExitStack() as undo:
            undo.callback(self._close)
            # TensorBoard writes to object stores too.
            is_url = isinstance(log_dir, str) and "://" in log_dir
            if log_dir is not None and not is_url and self.is_global_zero:
                self._log_dir = checked_folder("log_dir", log_dir)
            self._attached.callback(self._optimizers.hook(self.before_step, self.after_step).close)
            self._forward.enter_context(called_loop.through(self, self.run))
            for callback in given_callbacks(callbacks):
                self.add(callback)
            undo.pop_all()

    @property
    def callbacks(self) -> tuple[LoopCallback, ...]:
        """Return the callbacks, in their order."""
        return tuple(self._callbacks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.detach()
        else:
            self._close()

    def add(self, callback: LoopCallback) -> None:
        """Add a callback to the module, from the next training step on.

        Raises:
            TypeError: If it works in a Trainer only, or is not a callback.
            ValueError: If another callback sets the same option, or it needs a Lightning Trainer.
        """
        given_callbacks([*self._callbacks, callback])
        # A callback's wrappers belong below the attachment's own.
        self._forward.close()
        try:
            with ExitStack() as undo:
                undo.callback(callback.leave)
                callback.start(self)
                self._attached.callback(undo.pop_all().close)
            self._callbacks.append(callback)
        finally:
            self._forward.enter_context(called_loop.through(self, self.run))

    def keep(self, context: AbstractContextManager[Any]) -> None:
        """Enter a context until everything is restored."""
        self._attached.enter_context(context)

    def follow(self, name: str) -> None:
        """Count calls of another method of the module as calls of the module."""
        self._forward.close()
        # Each callback gets the methods when it starts.
        for callback in reversed(self._callbacks):
            callback.leave()
        self.steps = called_loop.called_methods(self.module, (*self.steps, name))
        for callback in self._callbacks:
            callback.start(self)
        self._forward.enter_context(called_loop.through(self, self.run))

    def detach(self) -> None:
        """Restore module and torch. May be called more than once."""
        try:
            if self._is_attached:
                if self._is_in_batch and not self.step_index:
                    self.stepless.warn(stacklevel=4)
                for callback in self._callbacks:
                    callback.finish()
        finally:
            self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a restart: the step, and the state of each callback."""
        states = {type(callback).__name__: callback.state_dict() for callback in self._callbacks}
        return {"step": self.step_index, "callbacks": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.step_index = state_dict["step"]
        for callback in self._callbacks:
            if state := state_dict["callbacks"].get(type(callback).__name__):
                callback.load_state_dict(state)

    def _close(self) -> None:
        self._is_attached = False
        UNEVEN.discard(self)
        self._forward.close()
        self._attached.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def attach_in_fabric(callback: LoopCallback, fabric: Any, module: Any) -> Attachment:
    """Attach a callback to a module that Lightning Fabric has just set up."""
    # The inner module, under the wrapper that sets autocast (Lightning 2.6).
    inner = called_loop.unwrapped(module._forward_module)
    attachment = called_loop.attachment_of(inner)
    if not isinstance(attachment, Attachment):
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        wrapper = module._forward_module
        attachment = Attachment(wrapper, None, (), loggers=fabric.loggers, scaler=scaler)
        made, mark = attachment, module.mark_forward_method

        def mark_and_follow(method: Any) -> None:
            name = getattr(method, "__name__", method)
            # A step of a LightningModule is marked and followed already.
            if name == "forward" or name not in made.steps:
                mark(method)
                made.follow(name)

        made.keep(shadowed(module, mark_forward_method=Replacement(mark, mark_and_follow)))
    attachment.add(callback)
    return attachment
