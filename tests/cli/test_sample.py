"""`jaxslowmo sample`: which model of a run it takes, and the bytes that a model writes.

Those are held against a loop that asks the model for one byte at a time.
"""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from cli.commands import QUICK, TINY, run
from jaxslowmo.checkpoint import load_consensus
from jaxslowmo.cli._config import SampleConfig
from jaxslowmo.cli._sample import _printable, find_model, generate
from jaxslowmo.models import GPT_PRESETS, GPTConfig, gpt_logits_fn, init_gpt

pytestmark = pytest.mark.xdist_group("sample")  # most tests read one run


@pytest.fixture(scope="module")
def gossip(text, tmp_path_factory):
    """Three replicas that differ, with something in flight."""
    out = tmp_path_factory.mktemp("gossip") / "out"
    saved = "--learning-rate 0.3 --steps 5 --checkpoint-every 3 --export"
    options = "--algorithm sgp --replicas 3 --overlap 2"
    assert (
        run(TINY, QUICK, {"check_parameters": True}, saved, options, "--data", text, "--out", out)
        == 0
    )
    return out


@pytest.fixture
def copied(gossip, tmp_path):
    return shutil.copytree(gossip, tmp_path / "run")


def leaves(params):
    return [np.asarray(x) for x in jax.tree.leaves(params)]


def test_the_model_of_a_checkpoint_is_what_was_exported(gossip, copied):
    model, params = find_model(gossip, None)
    assert model == GPT_PRESETS["tiny"]
    exported = load_consensus(gossip / "model", like=params)
    _, earlier = find_model(gossip, 3)
    far = 0
    for a, b, c in zip(*map(leaves, (params, exported, earlier)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-8)
        far = max(far, np.abs(a - c).max())
    assert far > 1e-4
    # The exported model alone, and in a run that kept no checkpoint.
    shutil.rmtree(copied / "checkpoints")
    for folder in (gossip / "model", copied):
        model, found = find_model(folder, None)
        assert model == GPT_PRESETS["tiny"]
        jax.tree.map(np.testing.assert_array_equal, found, exported)


def test_the_command_is_deterministic_and_says_the_prompt(call, gossip):
    ask = f"sample {gossip} --prompt 'File 3 says' --tokens 40"
    first = call(ask)
    assert (first.code, first.err) == (0, "")
    assert first.out.startswith("File 3 says")
    assert call(ask, "--step 5").out == first.out
    assert call(ask, "--seed 1").out != first.out
    assert call(ask, "--step 3").out != first.out
    call("sample", gossip, "--step 4").is_refused("step 4", "3, 5")


MODEL = GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=8)


@pytest.fixture(scope="module")
def params():
    # Larger than at the start of a training, so that bytes differ in how likely they are.
    return jax.tree.map(lambda x: 10 * x, init_gpt(MODEL, seed=1))


@pytest.fixture(scope="module")
def ranked(params):
    """Bytes from the least to the most likely one, after the window of a text and nothing else."""
    logits_fn = jax.jit(gpt_logits_fn(MODEL))
    return lambda text: np.argsort(
        np.asarray(logits_fn(params, np.array([[*text[-MODEL.context_length :]]]))[0, -1])
    )


def test_the_likeliest_bytes_of_a_window_that_slides(params, ranked):
    prompt = "a prompt that is longer, äö"
    text = [*prompt.encode()]
    for _ in range(12):
        text.append(int(ranked(text)[-1]))
    config = SampleConfig(Path(), prompt=prompt, tokens=12, temperature=0)
    assert generate(MODEL, params, config) == bytes(text)


def test_drawing(params, ranked):
    def text(**given):
        return generate(MODEL, params, SampleConfig(Path(), **{"tokens": 30, **given}))

    likeliest = text(temperature=0)
    assert text(top_k=1, temperature=2) == text(temperature=1e-30) == likeliest
    assert text(seed=3) == text(seed=3, top_k=256) != text(seed=4)
    assert len(set(text(temperature=50, tokens=300))) > 100  # nearly all the same to it
    assert len(set(text(temperature=1e30, top_k=2, tokens=300))) > 1
    few = text(temperature=9, top_k=3, tokens=40)
    places = [[*ranked(few[:i])[::-1]].index(few[i]) for i in range(1, len(few))]
    assert set(places) == {0, 1, 2}
    # Bytes of a shell that are no text.
    prompt = b"\xffa".decode("utf-8", "surrogateescape")
    assert text(prompt=prompt, tokens=1)[:2] == b"\xffa"


def test_what_is_printed_neither_fails_nor_steers_the_terminal():
    assert _printable(b"\x1b[2J\x07\t\xc2\x9b", "utf-8") == "\ufffd[2J\ufffd\t\ufffd"
    assert _printable("é".encode() + b"\xff.", "ascii") == "??."
