"""Text as bytes for a language model: any folder or file, by default Python's standard library.

The default is real text that every machine with Python has, so nothing is downloaded and nothing
needs to be shipped. Training windows start at random places, but which place is a pure function of
the seed and of the window's index: runs repeat, and resume, exactly.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "node_modules"}
)
_NUM_BYTE_VALUES = 256


class TextDataModule(pl.LightningDataModule):
    """Windows of `context` bytes and the bytes that follow them, from a folder or a file.

    A batch is a pair of `(batch_size, context)` int64 tensors: the bytes, and for each of them the
    byte that comes next. The text of a folder is split by file, that of a single file by position,
    so that no window has a part in training and a part in validation.

    Args:
        path: A folder, read recursively, or a single file; by default the source of Python's
            standard library, without its tests. Files that hold a zero byte are not text and are
            left out, as are hidden files and folders.
        context: Bytes per window.
        batch_size: Windows per batch.
        num_workers: Processes that prepare batches. The text is in memory, so none are needed.
        val_fraction: Share of the text held out for validation, in (0, 1).
        samples_per_epoch: Training windows per epoch; each epoch has the same ones.
        val_samples: Windows of the held-out text, evenly spaced, that a validation reads.
        max_bytes: The most text to read; of a larger folder, a fixed choice of its files.
        seed: Chooses the training windows.

    Raises:
        ValueError: If an argument is out of range, or if there is no text, or too little of it,
            at `path`.
    """

    def __init__(
        self,
        path: str | None = None,
        context: int = 128,
        batch_size: int = 16,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        samples_per_epoch: int = 65_536,
        val_samples: int = 512,
        max_bytes: int = 32 * 2**20,
        seed: int = 1,
    ) -> None:
        super().__init__()
        for name, value in (
            ("context", context),
            ("batch_size", batch_size),
            ("samples_per_epoch", samples_per_epoch),
            ("val_samples", val_samples),
            ("max_bytes", max_bytes),
        ):
            if value < 1:
                raise ValueError(f"`{name}={value}`: expected at least 1; give a larger number.")
        if not 0 < val_fraction < 1:
            raise ValueError(
                f"`val_fraction={val_fraction}`: not a share of the text. Expected a number "
                "between 0 and 1, both excluded. Give 0.1 to hold out a tenth."
            )
        if path is not None and not Path(path).exists():
            raise ValueError(
                f"`path={path}`: there is no such file or folder. Expected one that holds text. "
                "Correct it, or leave it out to read the source of Python's standard library."
            )
        self.path = path
        self.context = context
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.samples_per_epoch = samples_per_epoch
        self.val_samples = val_samples
        self.max_bytes = max_bytes
        self.seed = seed

    @cached_property
    def text(self) -> "SplitText":
        """The text, read when it is first needed."""
        if self.path is None:
            root, suffix = Path(sysconfig.get_paths()["stdlib"]), ".py"
        else:
            root, suffix = Path(self.path), ""
        text = _read_split(root, suffix, self.val_fraction, self.max_bytes)
        for part, data in (("training", text.train), ("held-out", text.val)):
            if len(data) <= self.context:
                raise ValueError(
                    f"`path={root}`: its {part} part has {len(data)} bytes of text. Expected more "
                    f"than `context={self.context}`. Give more text or a smaller `context`."
                )
        return text

    @property
    def unigram_entropy_nats(self) -> float:
        """Return the validation loss of a model that ignores the context, in nats per byte.

        Precisely: the cross-entropy `-mean(log p(byte))` over the very bytes that a validation
        predicts (the targets of its `val_samples` windows), where `p` are the frequencies of the
        256 byte values in the whole training text, each counted once more than it occurs, so that a
        byte that only the validation has costs a finite amount.
        """
        counts = np.bincount(self.text.train, minlength=_NUM_BYTE_VALUES) + 1
        log_p = np.log(counts / counts.sum())
        windows = self._val_windows()
        targets = torch.stack([windows[i][1] for i in range(len(windows))])
        return float(-log_p[targets.numpy()].mean())

    @override
    def setup(self, stage: str) -> None:
        _ = self.text  # read, and complained about, before the model is touched

    def _val_windows(self) -> "SpacedWindows":
        return SpacedWindows(self.text.val, self.context, self.val_samples)

    @override
    def train_dataloader(self) -> "ResumableLoader":
        windows = RandomWindows(self.text.train, self.context, self.samples_per_epoch, self.seed)
        return ResumableLoader(windows, **self._loader_options(), drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self._val_windows(), **self._loader_options())

    @override
    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Windows of the held-out text halfway between those of the validation."""
        windows = SpacedWindows(self.text.val, self.context, self.val_samples, phase=0.5)
        return DataLoader(windows, **self._loader_options())

    @override
    def predict_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self.val_dataloader()

    def _loader_options(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            # Without one of its own, making an iterator draws from the global random state, and a
            # validation more or less would change the dropout of the steps after it.
            "generator": torch.Generator(),
        }


class RandomWindows(Dataset[tuple[Tensor, Tensor]]):
    """Random windows. The start of a window depends only on the seed and its index."""

    def __init__(self, text: np.ndarray, context: int, num_windows: int, seed: int) -> None:
        self.text = text
        self.context = context
        self.num_windows = num_windows
        self.seed = seed

    def __len__(self) -> int:
        return self.num_windows

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = _hash(f"{self.seed}/{index}") % (len(self.text) - self.context)
        return _window(self.text, start, self.context)


class SpacedWindows(Dataset[tuple[Tensor, Tensor]]):
    """Evenly spaced windows, the same every time; `phase` in [0, 1) shifts them all."""

    def __init__(
        self, text: np.ndarray, context: int, num_windows: int, phase: float = 0.0
    ) -> None:
        num_starts = len(text) - context
        self.text = text
        self.context = context
        self.num_windows = min(num_windows, num_starts)
        self.phase = phase

    def __len__(self) -> int:
        return self.num_windows

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        num_starts = len(self.text) - self.context
        start = int((index + self.phase) * num_starts / self.num_windows)
        return _window(self.text, start, self.context)


class ResumableLoader(DataLoader[tuple[Tensor, Tensor]]):
    """A DataLoader that can resume from a checkpoint in the middle of an epoch.

    Lightning saves and restores the state of a train loader that has these two methods; without
    them, a resumed run would see the epoch's first batches again.
    """

    num_batches_read = 0
    num_batches_to_skip = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_batches_read": self.num_batches_read}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.num_batches_to_skip = state_dict["num_batches_read"]

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        skip, self.num_batches_to_skip = self.num_batches_to_skip, 0
        return self._read(skip)

    def _read(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        # Skipping is done by reading: a window costs microseconds, and so the order of the batches
        # is whatever sampler Lightning has put in for several processes.
        self.num_batches_read = 0
        for batch in super().__iter__():
            self.num_batches_read += 1
            if self.num_batches_read > skip:
                yield batch


@dataclass(frozen=True)
class SplitText:
    """The bytes of a text as uint8 arrays, split into two parts without a common file."""

    train: np.ndarray
    val: np.ndarray


def _read_split(root: Path, suffix: str, val_fraction: float, max_bytes: int) -> SplitText:
    texts = _read_texts(root, suffix, max_bytes)
    if not texts:
        raise ValueError(
            f"`path={root}`: it holds no text. Expected a file, or a folder with files, of text. "
            "Choose another one."
        )
    if len(texts) == 1:
        (text,) = texts.values()
        cut = round(len(text) * (1 - val_fraction))
        return SplitText(train=_to_array([text[:cut]]), val=_to_array([text[cut:]]))
    # Files go to validation in the order of their hashes, which has nothing to do with what is in
    # them, as long as they fit; a file larger than the share as a whole stays in training.
    budget = val_fraction * sum(map(len, texts.values()))
    held_out: set[str] = set()
    for name in sorted(texts, key=_hash):
        if len(texts[name]) <= budget:
            held_out.add(name)
            budget -= len(texts[name])
    if not held_out:
        held_out.add(min(texts, key=lambda name: (len(texts[name]), name)))
    return SplitText(
        train=_to_array([text for name, text in texts.items() if name not in held_out]),
        val=_to_array([text for name, text in texts.items() if name in held_out]),
    )


def _read_texts(root: Path, suffix: str, max_bytes: int) -> dict[str, bytes]:
    """Read text files by their name relative to `root`, up to `max_bytes`."""
    if root.is_file():
        names = {root.name: root}
    else:
        names = {path.relative_to(root).as_posix(): path for path in _walk(root, suffix)}
    texts: dict[str, bytes] = {}
    num_bytes = 0
    for name in sorted(names, key=_hash):
        if num_bytes >= max_bytes:
            break
        with names[name].open("rb") as file:
            text = file.read(max_bytes - num_bytes)
        if text.strip() and b"\0" not in text:
            texts[name] = text
            num_bytes += len(text)
    return dict(sorted(texts.items()))


def _walk(root: Path, suffix: str) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith(".")
        ]
        for name in files:
            path = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def _to_array(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\n".join(texts), dtype=np.uint8)


def _window(text: np.ndarray, start: int, context: int) -> tuple[Tensor, Tensor]:
    """Return the bytes `start ... start + context - 1`, and the same shifted by one."""
    window = torch.from_numpy(text[start : start + context + 1].astype(np.int64))
    return window[:-1], window[1:]


def _hash(name: str) -> int:
    """Return a number in [0, 2**64) that is the same on every machine, unlike Python's `hash`."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")
