"""A GPT by pmap in the usual form trains as well with seven of its lines changed."""

import difflib
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "pmap_gpt"


def program(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed_lines():
    """Of the code behind the docstring, as `diff` prints them."""
    before, after = (
        (FOLDER / f"{name}.py").read_text("utf-8").split('"""', 2)[2].splitlines()
        for name in ("every_step", "rarely")
    )
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in lines if line[0] in "+-" and line[1:].strip()]


def test_the_page_shows_what_changes():
    page = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    assert page.partition("```diff\n")[2].partition("```")[0].splitlines() == changed_lines()


@pytest.mark.usefixtures("standard_promotion")  # of optax's schedule
def test_it_learns(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    module = program("rarely")
    config = module.Config(block=16, layers=1, heads=2, width=32, batch=4)
    text = np.frombuffer(b"now and then " * 40, np.uint8).astype(np.int32)
    params, losses = module.train(61, config, text)
    assert losses[0] == pytest.approx(np.log(256), rel=0.05)
    assert losses[-1] < 0.5 * losses[0]
    # One copy, and as good as the devices' own.
    assert params["head"].shape == (32, 256)
    assert module.loss_fn(params, text[: 17 * 4].reshape(4, 17)) < 0.6 * losses[0]
