"""The boosted trees of the DLRM example: fitted on the training flights, chosen on October."""

import numpy as np


def test_trees_beat_chance_and_test_flights_choose_nothing(real_flights, monkeypatch):
    """With the test flights' answers turned round, the same trees are kept."""
    import trees

    monkeypatch.setattr(trees, "MOST_TREES", 5)
    parts = (part.rows(slice(None, None, 150)) for part in real_flights[:3])
    some = type(real_flights)(*parts, real_flights.num_rows)
    turned = some._replace(test=some.test._replace(late=1 - some.test.late))
    found, other = list(trees.boosted(some, tries=2)), list(trees.boosted(turned, tries=2))
    assert len(found) == 2
    best, same = found[-1], other[-1]
    assert best.validation == max(each.validation for each in found) > 0.55
    assert best.test > 0.55
    assert 1 <= best.settings["max_iter"] <= 5
    assert (best.settings, best.validation) == (same.settings, same.validation)
    np.testing.assert_allclose(best.test, 1 - same.test)
