"""An island trains the same under jax's debugging settings, and inside of `jax.set_mesh`."""

import pytest

import jaxslowmo as js
from islands.test_island import train
from support.strict import SETTINGS, assert_equal_bits


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_island_trains_alike(setting, tmp_path):
    mesh = js.make_mesh({"replica": 2})
    options = {"mesh": mesh, "periods": 2, "codec": js.codecs.int8()}
    expected = train(tmp_path / "plain", "one", slice(0, 2), **options)[1]
    with SETTINGS[setting](mesh):
        state = train(tmp_path / "set", "one", slice(0, 2), **options)[1]
    assert_equal_bits(state.params, expected.params)
