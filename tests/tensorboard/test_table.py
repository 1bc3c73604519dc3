"""The tables of a step: a summary line, a line per block, a line per tensor."""

from dataclasses import replace

import pytest

from lightning_unitscale.cli import main
from lightning_unitscale.tensorboard.history import LastStep, read_run
from lightning_unitscale.tensorboard.table import scale_summary, scale_table
from tests.tensorboard.runs import NAMES, snapshot, unit_scaled, with_nan, write

PLAIN = replace(
    snapshot(10),
    operands=(True, True, False, True, True, False),
    matmuls=(False, True, False, True, False, True),
)
SCALED = replace(unit_scaled(snapshot(10)), operands=PLAIN.operands, matmuls=PLAIN.matmuls)


def cells(table):
    """Return the cells of each line of a table below its rule."""
    lines = table.splitlines()
    rule = next(k for k, line in enumerate(lines) if line.startswith("---"))
    lines = lines[rule + 1 : lines.index("", rule)]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def read_back(path, snapshot):
    return LastStep(read_run(write(path, [snapshot])))


@pytest.mark.parametrize("is_read_back", [False, True])
def test_summary_counts_tensors_near_rms_1(is_read_back, tmp_path):
    # Tensor k is about 2**-2k and its gradient 2**(-4 - 2k); a gradient of zeros has no scale.
    expected = {
        "1 of 4 operands and 0 of 2 gradients within 2x of RMS 1, 1 and 0 within 4x": PLAIN,
        "4 of 4 operands and 2 of 2 gradients within 2x of RMS 1": SCALED,
        # Tensors that are not finite are not near 1.
        "2 of 4 operands and 1 of 2 gradients within 2x of RMS 1, 2 and 1 within 4x": with_nan(
            SCALED, 1, 4
        ),
        "": snapshot(10),
    }
    for k, (line, one) in enumerate(expected.items()):
        shown = read_back(tmp_path / str(k), one) if is_read_back else one
        assert scale_summary(shown) == line
        assert line in scale_table(shown)


def test_short_table_has_line_per_block():
    table = scale_table(SCALED, full=False)
    assert table.startswith("Scales at step 10")
    true, stored = (SCALED.log2_rms(stored=one).round(1) + 0.0 for one in (False, True))
    gradients = [SCALED.log2_rms("backward", stored=one).round(1) + 0.0 for one in (False, True)]
    first, second, _ = cells(table)
    assert first[:3] == ["blocks.0", "2 of 2", f"{true[1]} to {true[0]}"]
    assert first[3] == f"{min(stored[:2])} to {max(stored[:2])}"
    assert first[4:] == ["1 of 1", *(str(one[1]) for one in gradients)]
    assert second[:3] == ["blocks.1", "2 of 2", f"{true[4]} to {true[3]}"]
    assert scale_summary(SCALED) in table
    assert table.endswith(
        "lightning-unitscale report RUN_DIR --full, or ScaleMonitor.table(full=True)"
    )


def test_matmul_operands_have_a_star():
    lines = cells(f"{scale_table(SCALED)}\n\n")
    starred = [[field.endswith("*") for field in line[2:6]] for line in lines]
    assert starred == [
        [False, is_operand, False, is_matmul]
        for is_operand, is_matmul in zip(SCALED.operands, SCALED.matmuls, strict=True)
    ]


def test_table_without_units_has_one_value_column():
    table = scale_table(PLAIN, full=False)
    assert "true value" not in table and "stored  " not in table
    assert [line[0] for line in cells(table)] == ["blocks.0", "blocks.1", "head"]
    # The head's gradient is zero, and nothing reads its result.
    assert cells(table)[-1] == ["head", "-", "-", "-", "-"]


def test_table_without_operand_marks_shows_all_tensors():
    assert scale_table(snapshot(10), full=False) == scale_table(snapshot(10))


@pytest.mark.slow
def test_report_prints_short_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", [SCALED])
    printed = {}
    for arguments in ([], ["--full"]):
        main(["report", "run", *arguments])
        printed[bool(arguments)] = capsys.readouterr().out
    for full, text in printed.items():
        assert (NAMES[1].rpartition(".")[2] in text) == full
        assert scale_summary(SCALED) in text
    # The page has everything.
    page = (tmp_path / "scale_report/scales.html").read_text()
    assert "gelu" in page[page.index("<pre>") : page.index("</pre>")]
