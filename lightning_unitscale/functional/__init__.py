"""Unit-scaled operations.

Imported as ``U``, in place of ``torch.nn.functional`` as ``F``: every operation keeps torch's name
and arguments, and brings its output, and the gradients of its arguments, to RMS 1 for inputs and
output gradients at RMS 1. The rules that they follow, and how to add one, are in
``lightning_unitscale.functional.rules``; importing this package registers those of torch.
"""

from lightning_unitscale.functional.activation import *  # noqa: F403
from lightning_unitscale.functional.arithmetic import *  # noqa: F403
from lightning_unitscale.functional.attention import *  # noqa: F403
from lightning_unitscale.functional.conv import *  # noqa: F403
from lightning_unitscale.functional.loss import *  # noqa: F403
from lightning_unitscale.functional.matmul import *  # noqa: F403
from lightning_unitscale.functional.scale import *  # noqa: F403
