"""A rewrite of the graphs that Inductor compiles, forward and backward, as it is about to.

Private names used here were checked on torch 2.13: ``torch._inductor.config``, its documented hook
``post_grad_custom_post_pass`` and the class that it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import fx

REWRITE = "lowering.rewrite"  # note of a pass: what is to rewrite the graphs


def inductor_options(rewrite: Callable[[fx.Graph], None]) -> dict[str, Any]:
    """Settings of Inductor with which ``rewrite`` sees each graph, after the user's own pass.

    Args:
        rewrite: A function at the top of a file, whose text stands for it in Inductor's caches.
    """
    # Imported here: Inductor takes a second to load and most runs never need it.
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    set_by_user: Any = config.post_grad_custom_post_pass
    several = isinstance(set_by_user, (list, tuple))
    others = tuple(set_by_user) if several else (set_by_user,) if set_by_user else ()

    class Rewrite(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for one in others:
                one(graph)
            rewrite(graph)

        def uuid(self) -> Any | None:
            known = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in others]
            own = get_hash_for_files((inspect.getfile(rewrite),))
            return None if None in known else (own, *known)

    return {"post_grad_custom_post_pass": Rewrite()}
