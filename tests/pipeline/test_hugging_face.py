"""Hugging Face models on two CPU processes: the training of one device on the whole batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks

pytest.importorskip("transformers")

from tests.pipeline.hugging_face_run import (
    ADAPTED,
    CASES,
    WITHOUT_DROPOUT,
    module_of,
    save_pretrained,
)

# Their step reads numbers: only the model runs as a pipeline.
AROUND = {"own loss", "bf16", "adapters read"}
# Each stage draws numbers of its own.
DROPS = "dropout"
# Rules scale the gradients of microbatches, and BF16 rounds them.
TOLERANCES = {"u-mup": 1e-2, "bf16": 2e-3}
HAS_PEFT = find_spec("peft") is not None
RUN = [*CASES, *(ADAPTED if HAS_PEFT else ())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders in which the same cases were trained on one device and on two."""
    folders = {n: tmp_path_factory.mktemp(f"ranks-{n}") for n in (1, 2)}

    for folder in folders.values():
        save_pretrained(folder)

    def run(num_ranks: int) -> None:
        cases = [*RUN, WITHOUT_DROPOUT] if num_ranks == 1 else RUN
        run_ranks(
            "tests.pipeline.hugging_face_run", folders[num_ranks], str(num_ranks), *cases,
            num_ranks=num_ranks, timeout=500,
        )  # fmt: skip

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, folders))
    return folders


def _skip_without_peft(case: str) -> None:
    if case in ADAPTED and not HAS_PEFT:
        pytest.skip("needs peft")


def _found(runs: dict[int, Path], num_ranks: int, case: str) -> dict[str, Any]:
    return torch.load(runs[num_ranks] / f"{case}-0.pt", weights_only=False)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.parametrize("case", sorted({*CASES, *ADAPTED} - {DROPS}))
def test_training_matches_one_device(case: str, runs: dict[int, Path]) -> None:
    _skip_without_peft(case)
    expected, found = _found(runs, 1, case), _found(runs, 2, case)
    tolerance = TOLERANCES.get(case, 1e-6)
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["metrics"].keys() == expected["metrics"].keys()
    for name, one in found["metrics"].items():
        if name.startswith("scales/"):
            # Shares of small gradients are those of microbatches.
            continue
        assert one.item() == pytest.approx(expected["metrics"][name].item(), rel=tolerance), name
    around = any("only the module that the step calls" in text for text in found["warnings"])
    assert around == (case in AROUND)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_dropout_is_active(runs: dict[int, Path]) -> None:
    dropped, plain = _found(runs, 2, DROPS), _found(runs, 1, WITHOUT_DROPOUT)
    assert dropped["losses"] != pytest.approx(plain["losses"], rel=1e-4)
    assert dropped["losses"] == pytest.approx(_found(runs, 1, DROPS)["losses"], rel=0.05)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.filterwarnings("ignore")  # of transformers and peft
@pytest.mark.parametrize("case", ["late", "adapters", "adapters read"])
def test_checkpoints_load_into_the_plain_module(
    case: str, runs: dict[int, Path], tmp_path: Path
) -> None:
    _skip_without_peft(case)
    saved = [torch.load(runs[n] / f"{case}.ckpt", weights_only=False) for n in (1, 2)]
    assert saved[0]["state_dict"].keys() == saved[1]["state_dict"].keys()
    module = module_of(case, runs[2])
    module.configure_model()
    module.load_state_dict(saved[1]["state_dict"])
    for name, one in module.state_dict().items():
        torch.testing.assert_close(one, saved[0]["state_dict"][name], rtol=1e-3, atol=1e-4)
