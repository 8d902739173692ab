"""The losses of MaxText's own DiLoCo and Streaming DiLoCo, as record.py has recorded them."""

import json

import numpy as np
import pytest
from absl import app
from runs import EXCHANGES, MODELS, RECORDED, equal_keys, losses, other_batches, run

import train

LOSSES = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_losses(exchange, model):
    with other_batches(), equal_keys():
        found = losses(run(train.main, **EXCHANGES[exchange], **MODELS[model]))
    np.testing.assert_allclose(found, LOSSES[exchange][model]["maxtext"], rtol=0, atol=2e-6)


def test_its_own_diloco_is_refused():
    with pytest.raises(app.UsageError, match="enable_diloco"):
        run(train.main, enable_diloco=True)
