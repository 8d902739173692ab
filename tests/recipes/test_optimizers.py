"""All of optax under `sync=`: what the page says of each, and that an average stays."""

import numpy as np
import pytest

from recipes.doc_blocks import DOCS, LOOP, MAPPED, SETTING, run
from recipes.optax_cases import CASES, EVALUATE, MOVES, PLAIN, names_of
from recipes.optax_measured import is_known, measured, table
from support.exhaustive import sweep

# Those whose copies move are measured in tests/train/step/test_copies_follow.py, too.
USUAL = {"adam", "dpsgd", "lookahead", "mechanize", "sam"}
EVERY = [(module, name) for module, cases in CASES.items() for name in cases]


@pytest.mark.parametrize("module", CASES)
def test_no_name_is_missing(module):
    assert not set(names_of(module)) - set(CASES[module]) - PLAIN


def test_the_page_has_the_table():
    page = (DOCS / "recipes" / "optax.md").read_text(encoding="utf-8")
    assert table() in page, "run `python tools/optimizers.py`, which writes it"


def test_the_recipe_lowers_one_rate_for_all():
    """A run of the very blocks that test_docs_blocks.py runs, so they cost nothing here."""
    plateau = run("recipes", SETTING, LOOP, MAPPED, "Lower the rate on a plateau")
    assert plateau["rate"] < 0.1
    np.testing.assert_allclose(
        plateau["state"].opt_state.hyperparams["learning_rate"], plateau["rate"]
    )


@pytest.mark.parametrize(("module", "name"), sweep(EVERY, lambda module, name: name in USUAL))
def test_an_average_stays(module, name):
    """Updates by gradients that are equal on all replicas take back nothing that it moved."""
    case = CASES[module][name]
    if not is_known(module, name):
        return  # of another version of optax
    if case.refused:
        with pytest.raises(ValueError, match=case.refused):
            measured(case)
        return
    found = measured(case)
    assert found.spread > 2e-4
    assert found.together < 1e-6
    # Some make longer steps where parameters are larger, or farther away from the first ones.
    is_known_to_differ = bool(case.note or case.condition)
    assert found.left == pytest.approx(1, abs=0.1 if is_known_to_differ else 0.02)
    assert bool(found.moved) == case.condition.startswith((MOVES, EVALUATE))
