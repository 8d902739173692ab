"""`import jaxslowmo` loads neither jax nor optax; a name of `_api` does, at its first use."""

import pickle
from pathlib import Path

import pytest

import jaxslowmo as js
from architecture.fresh import run_python
from jaxslowmo import _api

PACKAGE = Path(js.__file__).parent
NAMES = [name for name in vars(_api) if not name.startswith("_")]


@pytest.mark.parametrize("module", ["jaxslowmo", "jaxslowmo.topology"])
def test_import_loads_neither_jax_nor_optax(module):
    code = f"import {module}, sys; print([m for m in ('jax', 'optax') if m in sys.modules])"
    assert run_python(code) == "[]"


def test_what_tools_ask_of_every_module_does_not_load_jax():
    code = (
        "import inspect, sys, jaxslowmo as js\n"
        "inspect.unwrap(js), inspect.getdoc(js), hasattr(js, '__wrapped__'), hasattr(js, '_x')\n"
        "print('jax' in sys.modules)"
    )
    assert run_python(code) == "False"


def test_topology_works_without_jax():
    code = (
        "import sys; sys.modules.update({'jax': None, 'optax': None})\n"
        "from jaxslowmo import topology\n"
        "import jaxslowmo as js\n"
        "print(js.topology is topology, topology.ring.__name__)"
    )
    assert run_python(code) == "True ring"


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_api_is_that_of_the_package(name):
    assert getattr(js, name) is getattr(_api, name)


def test_first_use():
    """Each in a package that was not imported before; jax, which takes long, stays loaded."""
    uses = [
        "from jaxslowmo import local_sgd as found",
        "import jaxslowmo as js; found = js.local_sgd",
        "from jaxslowmo import *; found = local_sgd",
        "import jaxslowmo as js; dir(js); found = vars(js)['local_sgd']",
        "import jaxslowmo as js; found = js.algorithms.local_sgd",
        "import jaxslowmo as js; js.make_train_step; found = js.algorithms.local_sgd",
    ]
    code = (
        "import sys\n"
        f"for use in {uses!r}:\n"
        "    for name in [m for m in sys.modules if m.partition('.')[0] == 'jaxslowmo']:\n"
        "        del sys.modules[name]\n"
        "    scope = {}\n"
        "    exec(use, scope)\n"
        "    from jaxslowmo._api import local_sgd\n"
        "    print(scope['found'] is local_sgd)"
    )
    assert run_python(code).split() == ["True"] * len(uses)


def test_star_import_brings_the_public_names_only():
    scope = {}
    exec("from jaxslowmo import *", scope)
    assert scope.keys() - {"__builtins__"} == {*NAMES, "topology"}


def test_dir_lists_the_api_at_once():
    listed = run_python("import jaxslowmo; print(*dir(jaxslowmo))").split()
    assert {*NAMES, "topology", "__version__", "__doc__"} <= set(listed)
    # Packages stand in it as soon as they are loaded.
    packages = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert {name for name in listed if not name.startswith("_")} <= {*NAMES, *packages}


def test_help_shows_the_api():
    text = run_python("import pydoc, jaxslowmo; print(pydoc.render_doc(jaxslowmo))")
    assert "Training one model on many machines" in text
    assert "local_sgd" in text
    assert "make_train_step" in text


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(js, "nonsense")
    with pytest.raises(
        AttributeError, match="module 'jaxslowmo' has no attribute 'nonsense'"
    ) as caught:
        js.nonsense  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("nonsense", js)
    with pytest.raises(ImportError, match="cannot import name 'nonsense' from 'jaxslowmo'"):
        from jaxslowmo import nonsense  # noqa: F401


@pytest.mark.parametrize("use", ["from jaxslowmo import local_sgd", "js.local_sgd", "dir(js)"])
def test_a_missing_dependency_is_named(use):
    code = (
        "import sys; sys.modules['optax'] = None\n"
        "import jaxslowmo as js\n"
        f"try:\n    {use}\n"
        "except ImportError as error:\n    print(error)"
    )
    assert "optax" in run_python(code)


def test_an_attribute_error_of_a_dependency_is_no_missing_name():
    code = (
        "import sys, types; sys.modules['optax'] = types.ModuleType('optax')\n"
        "import jaxslowmo as js\n"
        "try:\n    hasattr(js, 'local_sgd')\n"
        "except ImportError as error:\n    print(error)"
    )
    assert "module 'optax' has no attribute" in run_python(code)


def test_what_was_set_before_the_first_use_stays():
    code = "import jaxslowmo as js; js.local_sgd = 0; js.slowmo; print(js.local_sgd)"
    assert run_python(code) == "0"


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(getattr(_api, name), type)])
def test_a_class_survives_pickling(name):
    assert pickle.loads(pickle.dumps(getattr(js, name))) is getattr(js, name)


def test_a_pickle_loads_where_nothing_is_imported():
    data = pickle.dumps(js.CommRow)
    assert run_python(f"import pickle; print(pickle.loads({data!r}).__name__)") == "CommRow"
