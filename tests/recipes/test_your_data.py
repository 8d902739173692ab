"""The page "Your data": its loaders train, in one process and in two, and divide the data."""

import json

import numpy as np
import pytest

from recipes.doc_blocks import run, sections
from support.pairs import two_processes

pytestmark = pytest.mark.xdist_group("your data")  # they share two processes

PAGE = "your-data"
SETTING, TORCH, TF = "Setting", "DataLoader of torch", "tf.data"
UNEVEN = "Replicas with different amounts of data"
RUN = ["A generator", "grain", UNEVEN, "The same data in every process"]
WANTED = [1.0, -2.0, 3.0, 0.5]

# tf.data has these methods and many more.
STAND_IN = '''
class Dataset:
    """A few methods of tf.data.Dataset, on trees of NumPy arrays."""

    def __init__(self, tree, times=1):
        self.tree, self.times = tree, times

    def map(self, change):
        return Dataset(jax.tree.map(change, self.tree), self.times)

    def shard(self, num_shards, index):
        return self.map(lambda leaf: leaf[index::num_shards])

    def shuffle(self, buffer_size, seed):
        return self.map(lambda leaf: leaf[np.random.default_rng(seed).permutation(len(leaf))])

    def batch(self, batch_size, drop_remainder):
        assert drop_remainder
        return self.map(
            lambda leaf: leaf[: len(leaf) // batch_size * batch_size].reshape(
                -1, batch_size, *leaf.shape[1:]
            )
        )

    def repeat(self, times):
        return Dataset(self.tree, times)

    def as_numpy_iterator(self):
        for _ in range(self.times):
            for i in range(len(jax.tree.leaves(self.tree)[0])):
                yield jax.tree.map(lambda leaf: leaf[i], self.tree)
'''

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
    stand_in = f"{STAND_IN}\nparams = train(tf_batches(Dataset((x, y))))\n"
    blocks[TF] = "\n".join(sections(PAGE)[TF]) + stand_in
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


def test_what_iterates_as_tf_data_does(of_two):
    names = dict(run(PAGE, SETTING, TF))
    exec(STAND_IN, names)
    params = names["train"](names["tf_batches"](names["Dataset"]((names["x"], names["y"]))))
    for found in (flat(params), of_two[TF]):
        np.testing.assert_allclose(found, WANTED, atol=0.15)


def test_a_run_goes_on_where_it_was_saved(tmp_path):
    names = run(PAGE, SETTING, "grain", "Resuming")
    result, whole = names["result"], names["run"](tmp_path / "whole", 20)
    assert result.step == whole.step == 20
    np.testing.assert_array_equal(result.state.params["w"], whole.state.params["w"])
    np.testing.assert_array_equal(result.state.step, [20] * 4)
