import math
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from examples.text import RandomWindows, ResumableLoader, SpacedWindows, TextDataModule


def _folder(root: Path, num_files: int, size: int = 400) -> Path:
    """A folder whose file i holds the byte 32 + i only, so that a byte identifies its file."""
    for i in range(num_files):
        path = root / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([32 + i + 1]) * size)
    return root


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"path": "nowhere"}, "`path=nowhere`: there is no such file or folder"),
            ({"context": 0}, "`context=0`: expected at least 1"),
            ({"batch_size": -1}, "`batch_size=-1`: expected at least 1"),
            ({"val_samples": 0}, "`val_samples=0`: expected at least 1"),
            ({"val_fraction": 0.0}, "`val_fraction=0.0`: not a share"),
            ({"val_fraction": 1.0}, "`val_fraction=1.0`: not a share"),
        ],
    )
    def test_argument_out_of_range_is_an_error(
        self, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            TextDataModule(**arguments)

    def test_folder_without_text_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "image.bin").write_bytes(b"\x00\x01" * 1000)
        (tmp_path / "blank.txt").write_text("\n \n")
        (tmp_path / ".hidden.txt").write_text("not to be read " * 100)
        with pytest.raises(ValueError, match=r"`path=.*`: it holds no text"):
            TextDataModule(str(tmp_path)).setup("fit")

    def test_text_shorter_than_window_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "short.txt").write_text("ten bytes." * 20)
        data = TextDataModule(str(tmp_path), context=64)
        with pytest.raises(ValueError, match=r"held-out part has 20 bytes.*`context=64`"):
            data.setup("fit")

    def test_empty_file_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "empty.txt").touch()
        with pytest.raises(ValueError, match="holds no text"):
            TextDataModule(str(tmp_path / "empty.txt")).setup("fit")


class TestSplit:
    def test_a_folder_is_split_by_file(self, tmp_path: Path) -> None:
        data = TextDataModule(str(_folder(tmp_path, 40)), context=16, val_fraction=0.25)
        train, val = (set(part.tolist()) for part in (data.text.train, data.text.val))
        newline = {10}  # stands between files
        assert train & val <= newline
        assert len((train | val) - newline) == 40
        assert len(val - newline) == 10

    def test_split_depends_only_on_file_names(self, tmp_path: Path) -> None:
        first = TextDataModule(str(_folder(tmp_path / "a", 20)), val_fraction=0.3)
        second = TextDataModule(str(_folder(tmp_path / "b", 20)), val_fraction=0.3, seed=7)
        assert np.array_equal(first.text.val, second.text.val)

    def test_a_file_is_split_by_position(self, text_file: Path) -> None:
        text = text_file.read_bytes()
        data = TextDataModule(str(text_file), val_fraction=0.2)
        assert data.text.train.tobytes() + data.text.val.tobytes() == text
        assert len(data.text.val) == pytest.approx(0.2 * len(text), abs=1)

    def test_a_folder_of_one_file_is_split_like_the_file(self, text_file: Path) -> None:
        by_file = TextDataModule(str(text_file)).text
        by_folder = TextDataModule(str(text_file.parent)).text
        assert np.array_equal(by_file.val, by_folder.val)

    def test_one_of_few_large_files_is_for_validation(self, tmp_path: Path) -> None:
        data = TextDataModule(str(_folder(tmp_path, 2)), context=16)
        assert len(data.text.train) == len(data.text.val) == 400

    def test_max_bytes_takes_same_part_each_time(self, tmp_path: Path) -> None:
        root = str(_folder(tmp_path, 40))
        texts = [TextDataModule(root, context=16, max_bytes=4000).text for _ in range(2)]
        assert np.array_equal(texts[0].train, texts[1].train)
        assert sum(np.count_nonzero(part != 10) for part in (texts[0].train, texts[0].val)) == 4000

    def test_default_text_is_standard_library_without_tests(self) -> None:
        data = TextDataModule()
        assert len(data.text.train) > 5e6
        assert 0.08 < len(data.text.val) / len(data.text.train) < 0.12
        whole = data.text.train.tobytes() + data.text.val.tobytes()
        assert b"class OrderedDict(dict)" in whole
        assert b"class TestOrderedDict" not in whole
        assert 3.0 < data.unigram_entropy_nats < 3.5


class TestWindows:
    def test_targets_are_the_next_bytes(self, text_file: Path) -> None:
        data = TextDataModule(str(text_file), context=16, batch_size=4)
        for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
            tokens, targets = next(iter(loader))
            assert tokens.shape == targets.shape == (4, 16)
            assert tokens.dtype == targets.dtype == torch.int64
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            for row in tokens:
                assert bytes(row.tolist()) in text_file.read_bytes()

    def test_an_item_depends_on_seed_and_index_only(self) -> None:
        text = np.arange(10_000, dtype=np.int64).astype(np.uint8)
        one, same, other = (RandomWindows(text, 8, 100, seed) for seed in (1, 1, 2))
        _ = [one[i] for i in range(50)]
        torch.manual_seed(123)
        assert all(torch.equal(one[i][0], same[i][0]) for i in range(100))
        assert sum(torch.equal(one[i][0], other[i][0]) for i in range(100)) < 10

    def test_training_windows_reach_the_whole_text(self) -> None:
        text = np.arange(26, dtype=np.uint8)
        windows = RandomWindows(text, 5, 2000, seed=1)
        starts = Counter(int(windows[i][0][0]) for i in range(2000))
        assert set(starts) == set(range(21))
        assert max(starts.values()) < 2 * min(starts.values())

    @pytest.mark.parametrize("num_windows", [1, 7, 21, 500])
    def test_validation_windows_are_spread_and_inside(self, num_windows: int) -> None:
        text = np.arange(26, dtype=np.uint8)
        for phase in (0.0, 0.5):
            windows = SpacedWindows(text, 5, num_windows, phase)
            starts = [int(windows[i][0][0]) for i in range(len(windows))]
            assert len(windows) == min(num_windows, 21)
            assert starts == sorted(set(starts))
            assert all(windows[i][1][-1] <= 25 for i in range(len(windows)))

    def test_test_and_validation_windows_differ(self, text_file: Path) -> None:
        data = TextDataModule(str(text_file), context=8, val_samples=10)
        val, test = (
            {tuple(row.tolist()) for tokens, _ in loader for row in tokens}
            for loader in (data.val_dataloader(), data.test_dataloader())
        )
        assert len(val) == len(test) == 10
        assert not val & test

    def test_unigram_entropy_matches_cross_entropy_of_targets(self, tmp_path: Path) -> None:
        path = tmp_path / "text.txt"
        path.write_text("aab" * 300 + "abz" * 40)
        data = TextDataModule(str(path), context=8, val_samples=5)
        train = data.text.train.tobytes()
        targets = [byte for _, rows in data.val_dataloader() for byte in rows.flatten().tolist()]
        expected = -sum(
            math.log((train.count(bytes([byte])) + 1) / (len(train) + 256)) for byte in targets
        )
        assert data.unigram_entropy_nats == pytest.approx(expected / len(targets))

    def test_iterating_does_not_change_global_random_state(self, text_file: Path) -> None:
        data = TextDataModule(str(text_file), context=8)
        state = torch.get_rng_state()
        for loader in (data.train_dataloader(), data.val_dataloader()):
            next(iter(loader))
        assert torch.equal(torch.get_rng_state(), state)


class TestResume:
    def _loader(self) -> ResumableLoader:
        text = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
        return ResumableLoader(RandomWindows(text, 4, 20, seed=1), batch_size=2)

    def test_resumed_loader_continues_at_same_batch(self) -> None:
        whole = [tokens for tokens, _ in self._loader()]
        loader = self._loader()
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        resumed = self._loader()
        resumed.load_state_dict(loader.state_dict())
        rest = [tokens for tokens, _ in resumed]
        assert resumed.state_dict() == {"num_batches_read": 10}
        assert torch.equal(torch.stack(rest), torch.stack(whole[4:]))
        assert len(list(resumed)) == 10  # the epoch after is a whole one

    # The resumed run goes on in the folder of the first.
    @pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
    # By epochs, Lightning 2.6 counts the epoch twice that ended with the checkpoint's step, and
    # stops one early, whatever the loader.
    @pytest.mark.parametrize(
        ("limits", "stop"),
        [
            ({"max_steps": 10}, 3),
            ({"max_steps": 10}, 4),
            ({"max_steps": 10}, 5),
            ({"max_epochs": 3}, 3),
            ({"max_epochs": 3}, 5),
        ],
    )
    def test_resumed_run_sees_same_batches(
        self, text_file: Path, tmp_path: Path, limits: dict[str, int], stop: int
    ) -> None:
        """Resume in the middle of an epoch of four batches, and at its end."""

        def run(ckpt_path: str | None = None, **arguments: Any) -> list[Tensor]:
            model = _Recorder()
            data = TextDataModule(str(text_file), context=8, batch_size=2, samples_per_epoch=8)
            checkpoint = ModelCheckpoint(
                tmp_path / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1
            )
            trainer = pl.Trainer(
                accelerator="cpu",
                callbacks=[checkpoint],
                logger=False,
                limit_val_batches=0,
                enable_progress_bar=False,
                enable_model_summary=False,
                **arguments,
            )
            trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
            return model.seen

        whole = run(**limits)
        assert len(whole) == limits.get("max_steps", 12)
        assert torch.equal(whole[0], whole[4])  # an epoch has the windows of the one before
        resumed = run(str(tmp_path / f"checkpoints/step={stop}.ckpt"), **limits)
        assert torch.equal(torch.stack(resumed), torch.stack(whole[stop:]))


class _Recorder(pl.LightningModule):
    """Keeps the batches that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0])
        return self.weight * batch[0].float().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Never called, but Lightning warns of the data module's loader if there is none."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)
