"""`call("train --steps 5 --out", folder)`, text to train on, and programs in place of children."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from cli.commands import run, write_text
from support.fake_children import Fake


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """Cells of the lines of tables that rich has drawn."""
        lines = [line.strip("│ ") for line in self.out.splitlines() if line.startswith("│")]
        return [[part.strip() for part in line.split("│")] for line in lines]

    def is_refused(self, *parts: object) -> None:
        """Fail unless all that was said is one line on stderr with these parts, and the code 2."""
        assert (self.code, self.out, self.err.count("\n")) == (2, "", 1), self
        assert self.err.startswith("error: ")
        assert [part for part in parts if str(part) not in self.err] == [], self.err


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the programs that these tests have compiled."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module", autouse=True)
def runs_share_programs(programs: Path) -> Iterator[None]:
    """Compile each program once: every run of a command traces the same small model anew."""
    options = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(programs),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for values in (options, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is options:
            yield


@pytest.fixture(scope="module", autouse=True)
def schedule_of_optax() -> Iterator[None]:
    """Let optax's schedule divide counts, against strict promotion; nothing else of a command."""
    made = optax.warmup_cosine_decay_schedule

    def make(*args: Any, **options: Any) -> optax.Schedule:
        schedule = made(*args, **options)

        def rate(count: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):
                return schedule(count)

        return rate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optax, "warmup_cosine_decay_schedule", make)
        yield


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)  # without --out it makes a folder where it stands
    monkeypatch.setenv("COLUMNS", "100")

    def called(*parts: object) -> Outcome:
        code = run(*parts)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return called


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, not to be changed."""
    return write_text(tmp_path_factory.mktemp("texts") / "text")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Fake]:
    """`fake("exit 75")`: what is started instead of this Python."""

    def make(script: str) -> Fake:
        made = Fake(tmp_path / "fake", script)
        monkeypatch.setattr(sys, "executable", made.path)
        return made

    return make
