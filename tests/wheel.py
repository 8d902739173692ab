"""What an installed wheel must do, with nothing installed but what it asks for.

    python tests/wheel.py PYPROJECT

`make test-wheel` runs it in an empty environment, from a folder without the checkout on the path.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxslowmo as js

REPLICAS, STEPS = 4, 12


def train(sync: js.ParameterTransform) -> float:
    """Return the loss after some steps of linear regression; each replica has inputs of its own."""
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(
        lambda params, batch: jnp.mean((batch @ params["w"] - batch.sum(1)) ** 2),
        optax.sgd(0.1),
        sync=sync,
        mesh=mesh,
    )
    state = step.init({"w": jnp.zeros(4)})
    for key in jax.random.split(jax.random.key(0), STEPS):
        state, metrics = step(state, jax.random.normal(key, (REPLICAS * 8, 4)))
    return float(metrics["loss"].mean())


project = tomllib.loads(Path(sys.argv[1]).read_text("utf-8"))["project"]
assert js.__version__ == project["version"], js.__version__
package = Path(js.__file__).parent
assert package.is_relative_to(sys.prefix), f"not the installed one: {package}"
assert (package / "py.typed").exists()
exec("from jaxslowmo import *", {})  # no name needs an extra
loss = train(js.diloco("replica", sync_every=4))
assert loss < 0.1, loss
asked = ""
try:
    js.islands.join("file:///tmp/no-such-run", name="a")
except ModuleNotFoundError as error:
    asked = str(error)
assert "jaxslowmo[islands]" in asked, asked
without_extra = subprocess.run(
    [f"{sys.prefix}/bin/jaxslowmo", "train"], capture_output=True, text=True, check=False
)
assert without_extra.returncode != 0
assert "jaxslowmo[train]" in without_extra.stderr, without_extra.stderr
print(f"jaxslowmo {js.__version__} of the wheel trains: loss {loss:.2g} after {STEPS} steps")
