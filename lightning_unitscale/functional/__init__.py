"""Provide unit-scaled operations.

Import it as ``U``, in place of ``torch.nn.functional`` as ``F``. Every operation keeps torch's name
and arguments. It brings its output, and the gradients of its arguments, to RMS 1 for inputs and
output gradients at RMS 1. The rules, and how to add one, are in
``lightning_unitscale.functional.rules``. Importing this package registers those of torch.
"""

from lightning_unitscale.functional.activation import *  # noqa: F403
from lightning_unitscale.functional.arithmetic import *  # noqa: F403
from lightning_unitscale.functional.attention import *  # noqa: F403
from lightning_unitscale.functional.conv import *  # noqa: F403
from lightning_unitscale.functional.loss import *  # noqa: F403
from lightning_unitscale.functional.matmul import *  # noqa: F403
from lightning_unitscale.functional.scale import *  # noqa: F403
