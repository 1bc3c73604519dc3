"""Published architectures on two processes, compared with one process.

Every architecture of ``model_zoo.py`` trains for four steps in a LightningModule, by 1F1B with four
microbatches, with another number of tokens and labels in each. What is written is the largest
relative difference of a loss.

    python benchmarks/pipeline_architectures.py                # all of them: ten minutes
    python benchmarks/pipeline_architectures.py GPT-2 T5       # some
    python benchmarks/pipeline_architectures.py --markdown     # docs/measurements/architectures.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tabulate import tabulate

from benchmarks.measure import RESULTS, machine
from benchmarks.model_zoo import ZOO
from tests.distributed.launch import codes_of_ranks

RESULT = "pipeline_architectures.json"
LIMIT = 1e-6
_WORKER = "benchmarks.pipeline_training"
_FOLDERS = re.compile(r"/\S*/(?:site-packages|benchmarks)/")
_ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)): (.*)$", re.MULTILINE)


def row_of(name: str) -> dict[str, Any]:
    """Train one architecture on one process and on two."""
    begun = time.perf_counter()
    row: dict[str, Any] = {"architecture": name, "error": ""}
    with tempfile.TemporaryDirectory() as folder_name:
        folder, found = Path(folder_name), []
        for num_ranks in (1, 2):
            codes, outputs = codes_of_ranks(
                _WORKER, folder, str(num_ranks), name, num_ranks=num_ranks, timeout=200
            )
            if any(codes):
                row["error"] = _error_in("\n".join(outputs)) or f"exit codes {codes}"
                break
            found.append(json.loads((folder / f"{num_ranks}.json").read_text()))
    if not row["error"]:
        one, two = found
        pairs = zip(one["losses"], two["losses"], strict=True)
        row["difference"] = max(abs(a - b) / abs(a) for a, b in pairs)
        row["pipeline"] = two["way"]
    return {**row, "seconds": time.perf_counter() - begun}


def _error_in(output: str) -> str:
    """The last error, without the folders of this machine."""
    errors = _ERROR.findall(output)
    return textwrap.shorten(_FOLDERS.sub("", ": ".join(errors[-1])), 300) if errors else ""


def markdown(rows: list[dict[str, Any]]) -> str:
    """One row per architecture, then what does not run and why."""
    ran = [row for row in rows if not row["error"]]
    cells = [[row["architecture"], row["pipeline"], f"{row['difference']:.0e}"] for row in ran]
    third = -(-len(cells) // 3)
    cells += [["", "", ""]] * (3 * third - len(cells))
    lines = [cells[i] + cells[i + third] + cells[i + 2 * third] for i in range(third)]
    headers = ["architecture", "pipeline", "difference"] * 3
    failed = [f"- {row['architecture']}: {row['error']}" for row in rows if row["error"]]
    table = tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
    return "\n".join([table, "", *failed])


def main() -> int:
    """Print and write the table; returns whether a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    parser.add_argument("--markdown", action="store_true", help="print what is stored")
    options = parser.parse_args()
    path = RESULTS / RESULT
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    if options.markdown:
        print(markdown(known))
        return 0
    for name in options.names or list(ZOO):
        row = row_of(name)
        print(json.dumps(row), flush=True)
        kept = {one["architecture"]: one for one in known} | {name: row}
        known = [kept[each] for each in ZOO if each in kept]
        content = {"title": __doc__.splitlines()[0], "machine": machine(), "rows": known}
        path.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(row["error"] or row["difference"] > LIMIT for row in known))


if __name__ == "__main__":
    sys.exit(main())
