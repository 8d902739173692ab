"""`import jaxslowmo` loads neither jax nor optax; a name loads the package that has it.

`pip install .` brings jax, optax and numpy, and using all names needs no more.
"""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxslowmo as js
from support.waiting import PATIENCE_SECONDS

INIT = ast.parse(Path(js.__file__).read_text("utf-8"))
# One process for all that a Python must show in which nothing has been imported yet: jax, which
# takes long, is loaded once, and the package is imported anew before each part.
PROGRAM = """
import importlib.metadata, inspect, json, pickle, sys
said = {}
EXTRAS = "flax grain matplotlib obstore orbax orbax.checkpoint rich safetensors tyro".split()
HEAVY = [f"jaxslowmo.{x}" for x in ("embedding", "gradients", "pipeline", "reports", "train")]
def anew():
    for name in [m for m in sys.modules if m.partition(".")[0] == "jaxslowmo"]:
        del sys.modules[name]
def loaded(names):
    return [name for name in names if name in sys.modules]
def raised(use):
    try:
        exec(use)
    except ImportError as error:
        return "optax" in str(error)
sys.modules |= {"jax": None, "optax": None}
from jaxslowmo import topology
said["ring without jax"] = topology.ring(3).phone_book
del sys.modules["jax"], sys.modules["optax"]
anew()
import jaxslowmo as js
inspect.unwrap(js), inspect.getdoc(js), hasattr(js, "__wrapped__"), hasattr(js, "_x")
said["dir"] = dir(js)
js.topology.ring
said["loaded by an import"] = loaded(["jax", "optax"])
sys.modules["optax"] = None
anew()
import jaxslowmo as js
said["optax is missed"] = [*map(raised, ("from jaxslowmo import local_sgd", "js.local_sgd"))]
del sys.modules["optax"]
anew()
import jaxslowmo as js
js.slowmo, js.local_sgd, js.make_mesh, js.chain
said["loaded by a name"] = loaded(HEAVY)
asked = said["extras"] = []
class Finder:
    def find_spec(self, name, *_):
        if name in EXTRAS:
            asked.append(name)
            raise ImportError(name)
sys.meta_path.insert(0, Finder())
anew()
exec("from jaxslowmo import *")
asked += loaded(EXTRAS)
said["first use"] = []
for use in (
    "from jaxslowmo import local_sgd as found",
    # What was set before the first use stays.
    "import jaxslowmo as js; js.sgp = 0; js.slowmo; found = js.sgp or js.local_sgd",
):
    anew()
    scope = {}
    exec(use, scope)
    from jaxslowmo.algorithms import local_sgd
    said["first use"].append(scope["found"] is local_sgd)
anew()
said["pickled"] = pickle.loads(PICKLED).__name__
def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = missing
anew()
import jaxslowmo
said["version"] = jaxslowmo.__version__
print(json.dumps(said))
"""


def test_a_python_in_which_nothing_was_imported():
    data = pickle.dumps(js.reports.CommRow)
    command = [sys.executable, "-c", PROGRAM.replace("PICKLED", repr(data))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert {*js.__all__, "__version__", "__doc__"} <= set(said["dir"])
    assert {name for name in said.pop("dir") if not name.startswith("_")} == set(js.__all__)
    assert said == {
        "ring without jax": [[1, 2], [2, 0], [0, 1]],
        "loaded by an import": [],
        "optax is missed": [True] * 2,
        "loaded by a name": [],
        "extras": [],  # not even looked for
        "first use": [True] * 2,
        "pickled": "CommRow",
        "version": "0+checkout",
    }


def test_what_type_checkers_read_is_what_python_does():
    for_checkers = next(n for n in INIT.body if isinstance(n, ast.If)).body
    imports = [(node.module, alias) for node in for_checkers for alias in node.names]
    assert [alias.asname for _, alias in imports] == [alias.name for _, alias in imports]
    assert {alias.name for _, alias in imports} == set(js.__all__)
    for module, alias in imports:
        # A module says its place itself: `from .collectives import codecs`.
        place = f"jaxslowmo.{module}" if module else "jaxslowmo"
        scope = {}
        exec(f"from {place} import {alias.name} as found", scope)
        assert getattr(js, alias.name) is scope["found"]
    names = [name for name in js.__all__ if not isinstance(getattr(js, name), type(js))]
    assert len(names) <= 55  # the top level stays small


def test_moved_names_work_and_say_where_they_are_and_an_unknown_name_is_an_attribute_error():
    moved = vars(js)["_MOVED_TO"]
    assert len(moved) == 24
    assert not moved.keys() & {*js.__all__}
    for name, home in moved.items():
        with pytest.warns(DeprecationWarning, match=rf"is jaxslowmo\.{home}\.{name}; .* 0\.5"):
            found = getattr(js, name)
        assert found is getattr(getattr(js, home), name)
    with pytest.raises(AttributeError, match="nonsense") as caught:
        js.nonsense  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("nonsense", js)
