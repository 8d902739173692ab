"""Programs that stand for a child of the command line."""

import sys

import pytest

from support.fake_children import Fake


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake("exit 75")`: what is started instead of this Python."""

    def make(script: str) -> Fake:
        made = Fake(tmp_path / "fake", script)
        monkeypatch.setattr(sys, "executable", made.path)
        return made

    return make
