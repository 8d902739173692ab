"""`jaxslowmo sample`: writes text, byte by byte, with the model of a run."""

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from jaxslowmo.checkpoint import CheckpointError, Checkpoints, consensus_extra, load_consensus
from jaxslowmo.models import GPTConfig, gpt_logits_fn, init_gpt

from .._support.files import is_export
from ._config import SampleConfig, argument_errors, replace_options
from ._errors import CommandError
from ._folder import RunFolder, saved_config
from ._setup import Model, make_step


def sample(config: SampleConfig) -> int:
    """Print the prompt and the text that the model adds, and return the exit code.

    Raises:
      CommandError: there is no model, or it cannot be read.
    """
    with argument_errors():
        model, params = find_model(config.run, config.step)
    print(_printable(generate(model, params, config), sys.stdout.encoding or "utf-8"))
    return 0


def _printable(text: bytes, encoding: str) -> str:
    """Return text for stdout, with replacements for invalid bytes and control characters."""
    letters = text.decode("utf-8", "replace")
    plain = re.sub(r"(?!\s)[\x00-\x1f\x7f-\x9f]", "\ufffd", letters)
    return plain.encode(encoding, "replace").decode(encoding)


def generate(model: GPTConfig, params: Any, config: SampleConfig) -> bytes:
    """Return the prompt and the bytes that the model adds.

    One program writes all bytes; for each the model sees the last `context_length` before it.

    Args:
      model: shape of the model.
      params: one copy of its parameters.
      config: the prompt, the number of bytes, and how they are drawn.
    """
    # Bytes from the shell that are no UTF-8 are kept.
    prompt = np.frombuffer(config.prompt.encode("utf-8", "surrogateescape"), np.uint8)
    begin, end, length = prompt.size, prompt.size + config.tokens, model.context_length
    text = np.zeros(max(end, length), np.uint8)
    text[:begin] = prompt
    keys = jax.random.split(jax.random.key(config.seed), config.tokens)
    logits_fn = gpt_logits_fn(model)

    def write(size: jax.Array, text: jax.Array) -> jax.Array:
        start = jnp.maximum(size - length, 0)
        window = jax.lax.dynamic_slice(text, [start], [length])
        # Attention is causal, so the zeros after the text have no effect.
        logits = logits_fn(params, window[None])[0, size - 1 - start]
        return text.at[size].set(_sample_byte(logits, keys[size - begin], config))

    written = jax.jit(lambda text: jax.lax.fori_loop(begin, end, write, text))(text)
    return np.asarray(written)[:end].tobytes()


def _sample_byte(logits: jax.Array, key: jax.Array, config: SampleConfig) -> jax.Array:
    if config.temperature == 0:
        return jnp.argmax(logits).astype(jnp.uint8)
    if config.top_k:
        least = jax.lax.top_k(logits, config.top_k)[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    # Not logits / temperature, which a tiny temperature would make infinite.
    scaled = (logits - logits.max()) / config.temperature
    return jax.random.categorical(key, scaled).astype(jnp.uint8)


def find_model(run: Path, step: int | None) -> tuple[GPTConfig, Any]:
    """Return shape and parameters of the model of a run.

    Args:
      run: folder of a run, from which the newest checkpoint is read, else the exported model; or
        the folder of an exported model.
      step: step of the checkpoint; None: the newest.

    Raises:
      CommandError: there is no model, or it cannot be read.
    """
    if not run.is_dir():
        raise CommandError(f"RUN must be the folder of a run or of an exported model, got {run}")
    folder = RunFolder(run)
    try:
        if step is not None or folder.newest_step() is not None:
            return _load_checkpoint(folder / "checkpoints", step)
        for path in filter(is_export, (run, folder / "model")):
            return _load_export(path)
    except CheckpointError as error:
        older = error.older_step
        hint = "" if older is None else f" --step {older} takes the one before."
        raise CommandError(f"{error.reason}{hint}") from error
    raise CommandError(
        f"{run} holds no model: no checkpoint (train saves one unless --checkpoint-every is 0, "
        "compare saves none), and none that --export wrote"
    )


def _load_checkpoint(folder: Path, step: int | None) -> tuple[GPTConfig, Any]:
    with Checkpoints(folder) as checkpoints:
        config = saved_config(checkpoints.extra(step=step))
        # Each replica on one virtual device, whatever axes split the model in training.
        sizes = config.mesh.sizes
        axes = {x: sizes[x] for x in ("replica", "device") if x in sizes}
        whole = ",".join(f"{name}={size}" for name, size in axes.items())
        config = replace_options(config, {"mesh": whole, "attention": "xla"})
        mesh = js.virtual_mesh(axes)
        model = Model(config, mesh)
        train_step, params = make_step(config, model.loss_fn, mesh), init_gpt(model.config)
        names = model.other_names()
        restored = checkpoints.restore(train_step, params, step=step, names=names)
    return model.config, train_step.consensus(restored.state)


def _load_export(folder: Path) -> tuple[GPTConfig, Any]:
    shape = consensus_extra(folder).get("model")
    if shape is None:
        raise CommandError(
            f"{folder} does not say what model it is: train with --resume --export, which exports "
            "it again"
        )
    model = GPTConfig(**shape)
    return model, load_consensus(folder, like=init_gpt(model))
