"""The GPT as a list of layers: its tree both ways; the values are those of `test_gpt.py`."""

import pytest

from jaxslowmo.models import GPTConfig, gpt_layers, init_gpt


@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back(tied):
    config = GPTConfig(num_layers=3, num_heads=2, embed_dim=16, context_length=8, tied=tied)
    parts, params = gpt_layers(config), init_gpt(config)
    layers = parts.split(params)
    assert len(layers) == len(parts.layers) == 3 + 2
    assert parts.join(layers) == params
    groups = [[layers[i]["embed"]["kernel"] for i, path in group] for group in parts.tied]
    assert all(x is params["embed"]["kernel"] for group in groups for x in group)
    assert parts.tied == (((0, "embed/kernel"), (4, "embed/kernel")),) * tied
    assert parts.layers[1] is parts.layers[2]  # stages with as many blocks share a program
