"""`import jaxslowmo` loads neither jax nor optax; a name loads the package that has it.

`pip install .` brings jax, optax and numpy, and using all names needs no more.
"""

import ast
import importlib.metadata
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import jaxslowmo as js
from support.waiting import PATIENCE_SECONDS

INIT = ast.parse(Path(js.__file__).read_text("utf-8"))
EXTRAS = [
    "flax",
    "grain",
    "matplotlib",
    "obstore",
    "orbax",
    "orbax.checkpoint",
    "rich",
    "safetensors",
    "tyro",
]


def run_python(code: str) -> str:
    """Return what `code` prints in a Python in which nothing has been imported yet."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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


def test_the_top_level_stays_small():
    names = [name for name in js.__all__ if not isinstance(getattr(js, name), type(js))]
    assert len(names) <= 55
    states = [name for name in names if name.endswith(("Report", "State", "Times", "Result"))]
    assert states == ["TrainState"]


def test_all_names_are_used_without_the_extras_that_are_not_even_looked_for():
    code = (
        "import sys\n"
        "asked = []\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name in {EXTRAS}:\n"
        "            asked.append(name)\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from jaxslowmo import *\n"
        "print(asked)"
    )
    assert run_python(code) == "[]"


def test_the_version_is_that_of_the_installed_package_or_says_that_there_is_none():
    code = (
        "from importlib import metadata\n"
        "def missing(name):\n    raise metadata.PackageNotFoundError(name)\n"
        "import jaxslowmo; print(jaxslowmo.__version__)\n"
        "for name in [m for m in sys.modules if m.partition('.')[0] == 'jaxslowmo']:\n"
        "    del sys.modules[name]\n"
        "metadata.version = missing\n"
        "import jaxslowmo; print(jaxslowmo.__version__)"
    )
    version = importlib.metadata.version("jaxslowmo")
    assert run_python(f"import sys\n{code}").split() == [version, "0+checkout"]


def test_an_import_and_what_tools_ask_of_every_module_load_no_jax():
    code = (
        "import inspect, sys, jaxslowmo as js, jaxslowmo.topology\n"
        "inspect.unwrap(js), inspect.getdoc(js), hasattr(js, '__wrapped__'), hasattr(js, '_x')\n"
        "dir(js), js.__all__, js.topology.ring\n"
        "print([m for m in ('jax', 'optax') if m in sys.modules])"
    )
    assert run_python(code) == "[]"
    without = "import sys; sys.modules.update({'jax': None, 'optax': None})\n"
    code = "from jaxslowmo import topology\nprint(topology.ring(3).phone_book)"
    assert run_python(without + code) == "((1, 2), (2, 0), (0, 1))"


def test_a_name_loads_no_package_that_it_does_not_need():
    heavy = ("embedding", "gradients", "pipeline", "reports", "train")
    code = (
        "import sys, jaxslowmo as js\njs.slowmo, js.local_sgd, js.make_mesh, js.chain\n"
        f"print([name for name in {heavy} if f'jaxslowmo.{{name}}' in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_moved_names_work_and_say_where_they_are():
    moved = vars(js)["_MOVED_TO"]
    assert len(moved) == 24
    assert not moved.keys() & {*js.__all__}
    for name, home in moved.items():
        with pytest.warns(DeprecationWarning, match=rf"is jaxslowmo\.{home}\.{name}; .* 0\.5"):
            found = getattr(js, name)
        assert found is getattr(getattr(js, home), name)


def test_classes_survive_pickling():
    for cls in (js.TrainState, js.gradients.Policy, js.reports.CommRow, js.spec.ExchangeState):
        assert pickle.loads(pickle.dumps(cls)) is cls
    data = pickle.dumps(js.reports.CommRow)  # loads where nothing is imported
    assert run_python(f"import pickle; print(pickle.loads({data!r}).__name__)") == "CommRow"


def test_first_use():
    """Each in a package that was not imported before; jax, which takes long, stays loaded."""
    uses = [
        "from jaxslowmo import local_sgd as found",
        "from jaxslowmo import *; found = local_sgd",
        "import jaxslowmo as js; js.local_sgd; found = vars(js)['local_sgd']",
        "import jaxslowmo as js; found = js.algorithms.local_sgd",
        "import jaxslowmo as js; js.make_train_step; found = js.algorithms.local_sgd",
        # What was set before the first use stays.
        "import jaxslowmo as js; js.sgp = 0; js.slowmo; found = js.sgp or js.local_sgd",
    ]  # fmt: skip
    code = (
        "import sys\n"
        f"for use in {uses!r}:\n"
        "    for name in [m for m in sys.modules if m.partition('.')[0] == 'jaxslowmo']:\n"
        "        del sys.modules[name]\n"
        "    scope = {}\n"
        "    exec(use, scope)\n"
        "    from jaxslowmo.algorithms import local_sgd\n"
        "    print(scope['found'] is local_sgd)"
    )
    assert run_python(code).split() == ["True"] * len(uses)


def test_a_star_import_and_dir_have_the_public_names_only():
    scope = {}
    exec("from jaxslowmo import *", scope)
    assert scope.keys() - {"__builtins__"} == set(js.__all__)
    listed = run_python("import jaxslowmo; print(*dir(jaxslowmo))").split()
    assert {*js.__all__, "__version__", "__doc__"} <= set(listed)
    assert {name for name in listed if not name.startswith("_")} == set(js.__all__)


def test_an_unknown_name_is_an_attribute_error_and_a_missing_dependency_is_none():
    with pytest.raises(AttributeError, match="nonsense") as caught:
        js.nonsense  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("nonsense", js)
    for module in ("None", "types.ModuleType('optax')"):  # missing, and one that is broken
        code = (
            f"import sys, types; sys.modules['optax'] = {module}\n"
            "import jaxslowmo as js\n"
            "for use in ('from jaxslowmo import local_sgd', 'js.local_sgd', 'js.algorithms'):\n"
            "    try:\n        exec(use)\n"
            "    except ImportError as error:\n        print('optax' in str(error))"
        )
        assert run_python(code).split() == ["True"] * 3
