import pytest
import torch

from torch_compat.examples import checkpoint


def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    checkpoint.save(path, {"step": 1})

    def fails(state, file):
        file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(path, {"step": 2})
    assert checkpoint.load(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]
