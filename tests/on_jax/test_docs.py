"""The programs on the documentation's pages run as they are, and say what the pages say."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import libraries  # noqa: F401, before a page imports transformers
import numpy as np

import jaxslowmo as js
from recipes.doc_blocks import LOAD_IN_TORCH, TORCH, fresh, num_blocks, run, sections
from support.waiting import PATIENCE_SECONDS


def test_the_program(tmp_path: Path):
    (program,) = sections("torch-on-jax")[""]
    assert num_blocks("torch-on-jax") == 1
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    share, word = done.stdout.split()
    assert word == "right"
    assert 80 < int(share.rstrip("%")) <= 100


def test_an_export_is_the_model_in_torch():
    names = {"jax": jax, "jnp": jnp, "js": js, "mesh": js.make_mesh({"replica": 4})}
    found = fresh("reading-state", LOAD_IN_TORCH, names=names)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    expected = x @ np.asarray(found["kernel"]) + 1
    got = found["torch_model"](found["torch"].from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_transformers_in_stages():
    """The recipes compare with the models themselves. Without a key there is no dropout."""
    names = run("model-parallel", *TORCH)
    loss, arguments = jax.jit(names["model"]), (names["layers"], names["batches"][0])
    values = [float(loss(*arguments, rng=jax.random.key(i))) for i in range(2)]
    assert len({*values, float(loss(*arguments))}) == 3
