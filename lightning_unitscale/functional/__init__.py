"""Provide unit-scaled operations.

Import it as ``U``, in place of ``torch.nn.functional`` as ``F``. Every operation keeps torch's name
and arguments. It brings its output, and the gradients of its arguments, to RMS 1 for inputs and
output gradients at RMS 1. The rules, and how to add one, are in
``lightning_unitscale.functional.rules``. Importing this package registers those of torch.

Many operations have one more argument, ``constraint``. The factor that brings the output to RMS 1
differs from those that bring the gradients to RMS 1, but one factor for all is needed for true
gradients if another operation reads the same tensor. ``"to_output_scale"`` (the default) uses the
factor of the output. ``"to_grad_input_scale"`` uses that of the only gradient,
``"to_left_grad_scale"`` and ``"to_right_grad_scale"`` that of one of two. ``"gmean"``, ``"hmean"``
and ``"amean"`` use a mean of all. ``None`` keeps a factor for each.
"""

from lightning_unitscale.functional.activation import *  # noqa: F403
from lightning_unitscale.functional.arithmetic import *  # noqa: F403
from lightning_unitscale.functional.attention import *  # noqa: F403
from lightning_unitscale.functional.conv import *  # noqa: F403
from lightning_unitscale.functional.loss import *  # noqa: F403
from lightning_unitscale.functional.matmul import *  # noqa: F403
from lightning_unitscale.functional.scale import *  # noqa: F403
