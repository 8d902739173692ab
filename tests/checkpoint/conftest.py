"""A run of two replicas, for tests that ask only how it is saved."""

import pytest

from checkpoint.runs import MODEL_STATE, PARAMS, make_step


@pytest.fixture(scope="module")
def step():
    return make_step("local_sgd", 2)


@pytest.fixture(scope="module")
def state(step):
    return step.init(PARAMS, model_state=MODEL_STATE)
