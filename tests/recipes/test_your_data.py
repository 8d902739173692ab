"""The page "Your data": its loaders train, in one process and in two, and divide the data."""

import json

import numpy as np
import pytest

from recipes.doc_blocks import run, sections
from support.pairs import two_processes

pytestmark = pytest.mark.xdist_group("your data")  # they share two processes

PAGE = "your-data"
SETTING = "Setting"
UNEVEN = "Replicas with different amounts of data"
RUN = ["A generator", "grain", UNEVEN, "The same data in every process"]
WANTED = [1.0, -2.0, 3.0, 0.5]

PROGRAM = """
import json
import warnings

warnings.simplefilter("error", UserWarning)
said = {}
names = {"jax": jax}
exec(setting, names)
for title, code in blocks.items():
    exec(code, names)
    params = names["params"]
    said[title] = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)).tolist(), params)
print(json.dumps(said))
"""


def flat(params):
    return [*np.ravel(params["w"]).tolist(), float(params["b"])]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What the blocks leave in two processes of two devices; the first makes CPU devices."""
    blocks = {title: "\n".join(sections(PAGE)[title]) for title in RUN}
    setting = "\n".join(sections(PAGE)[SETTING][1:])
    program = f"import numpy as np\nsetting, blocks = {setting!r}, {blocks!r}\n" + PROGRAM
    printed = two_processes(program, tmp_path_factory.mktemp("data"), devices=2)
    first, second = (json.loads(text.splitlines()[-1]) for text in printed)
    assert first == second
    return {title: flat(params) for title, params in first.items()}


@pytest.mark.parametrize("title", RUN)
def test_it_trains_in_one_process_and_in_two(of_two, title):
    one = flat(run(PAGE, SETTING, title)["params"])
    for found in (one, of_two[title]):
        np.testing.assert_allclose(found, WANTED, atol=0.15)
    if title != "grain":  # elsewhere the page says that the batches are the same
        np.testing.assert_allclose(of_two[title], one, rtol=1e-6)


def test_a_run_goes_on_where_it_was_saved(tmp_path):
    names = run(PAGE, SETTING, "grain", "Resuming")
    result, whole = names["result"], names["run"](tmp_path / "whole", 20)
    assert result.step == whole.step == 20
    np.testing.assert_array_equal(result.state.params["w"], whole.state.params["w"])
    np.testing.assert_array_equal(result.state.step, [20] * 4)
