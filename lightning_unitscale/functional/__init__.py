"""Unit-scaled operations, the rules they follow, and the primitives that place a scale.

Importing this package registers the rule of every operation that it knows.
"""

from lightning_unitscale.functional import (
    activation_rules as activation_rules,
)
from lightning_unitscale.functional import (
    arithmetic_rules as arithmetic_rules,
)
from lightning_unitscale.functional import (
    attention_rules as attention_rules,
)
from lightning_unitscale.functional import (
    convolution_rules as convolution_rules,
)
from lightning_unitscale.functional import (
    linear_rules as linear_rules,
)
from lightning_unitscale.functional import (
    loss_rules as loss_rules,
)
from lightning_unitscale.functional import (
    norm_rules as norm_rules,
)
from lightning_unitscale.functional import (
    pool_rules as pool_rules,
)
from lightning_unitscale.functional import (
    product_rules as product_rules,
)
from lightning_unitscale.functional.quadrature import elementwise_factors
from lightning_unitscale.functional.rule import (
    Factors,
    ScaleRule,
    register_rule,
    registered_rules,
    rule_of_function,
    rule_of_method,
)
from lightning_unitscale.functional.scale import scale, scale_bwd, scale_fwd

__all__ = [
    "Factors",
    "ScaleRule",
    "elementwise_factors",
    "register_rule",
    "registered_rules",
    "rule_of_function",
    "rule_of_method",
    "scale",
    "scale_bwd",
    "scale_fwd",
]
