"""The schedules by name: which rank runs which stages, and what each schedule asks for. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Placement = Literal["single", "loop", "v"]


@dataclass(frozen=True)
class Schedule:
    """One order in which microbatches pass through the stages.

    Attributes:
        name: Its name in ``torch.distributed.pipelining``.
        placement: ``"single"``: one stage per rank. ``"loop"``: rank ``r`` of ``P`` has the stages
            ``r``, ``r + P``, ... ``"v"``: it has the stages ``r`` and ``2 P - 1 - r``.
        splits_backward: Whether gradients of inputs and of weights are computed apart.
    """

    name: str
    placement: Placement
    splits_backward: bool = False

    def stages_of(self, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
        """Stages of a rank, in ascending order."""
        if self.placement == "v":
            return (rank, 2 * num_ranks - 1 - rank)
        return tuple(range(rank, num_stages, num_ranks))

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Rank of a stage."""
        if self.placement == "v" and stage >= num_ranks:
            return 2 * num_ranks - 1 - stage
        return stage % num_ranks

    def check(self, num_stages: int, num_ranks: int, num_microbatches: int) -> None:
        """Check that the schedule can run.

        Raises:
            ValueError: Naming the number that does not fit.
        """
        if not isinstance(num_microbatches, int) or num_microbatches < 1:
            raise ValueError(
                f"num_microbatches={num_microbatches!r}: expected a whole number of at least 1."
            )
        expected = {"single": num_ranks, "v": 2 * num_ranks}.get(self.placement)
        if expected is not None and num_stages != expected:
            per_rank = "one stage" if self.placement == "single" else "two stages"
            raise ValueError(
                f"num_stages={num_stages}: {self.name} runs {per_rank} on each of the {num_ranks} "
                f"ranks; expected {expected} stages; cut the module into as many, or choose "
                "another schedule."
            )
        if num_stages < num_ranks or num_stages % num_ranks:
            raise ValueError(
                f"num_stages={num_stages}: the {num_ranks} ranks cannot have as many each; "
                f"expected a multiple of {num_ranks} stages."
            )
        if self.name in ("1F1B", "DualPipeV") and num_microbatches < num_stages:
            raise ValueError(
                f"num_microbatches={num_microbatches}: {self.name} keeps {num_stages} stages busy "
                f"with a microbatch each; expected at least {num_stages} microbatches; use more of "
                "them, or another schedule, such as GPipe."
            )
        rounds = max(1, num_microbatches // num_ranks)
        if self.name.startswith("Interleaved") and num_microbatches % rounds:
            raise ValueError(
                f"num_microbatches={num_microbatches}: {self.name} runs them in {rounds} equal "
                f"rounds on {num_ranks} ranks; expected a multiple of {num_ranks}."
            )


SCHEDULES = {
    one.name: one
    for one in (
        Schedule("GPipe", "single"),
        Schedule("1F1B", "single"),
        Schedule("Interleaved1F1B", "loop"),
        Schedule("LoopedBFS", "loop"),
        Schedule("InterleavedZeroBubble", "loop", splits_backward=True),
        Schedule("ZBVZeroBubble", "v", splits_backward=True),
        Schedule("DualPipeV", "v", splits_backward=True),
    )
}


def find_schedule(name: str) -> Schedule:
    """The schedule of this name, in any case.

    Raises:
        ValueError: If there is none.
    """
    for known, schedule in SCHEDULES.items():
        if str(name).lower() == known.lower():
            return schedule
    raise ValueError(f"schedule={name!r}: expected one of {', '.join(SCHEDULES)}.")
