"""scikit-learn's gradient boosting on the same flights: the line that the DLRM is held to."""

import itertools
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from flights import CATEGORICAL, Flights, Split
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import TargetEncoder

MOST_CATEGORIES = (
    255  # that the trees split into sets; more are encoded by their share of late ones
)
GRID = {
    "learning_rate": (0.03, 0.06, 0.1),
    "max_leaf_nodes": (15, 31, 63),
    "l2_regularization": (0.0, 1.0, 10.0),
    "max_features": (0.3, 0.6, 1.0),
}
MOST_TREES = 300


class Trees(NamedTuple):
    """Boosted trees.

    Attributes:
      validation: area under the ROC curve on the validation flights, by which trees are chosen.
      test: the same on the test flights.
      settings: of `HistGradientBoostingClassifier`; `max_iter` is the number of trees.
    """

    validation: float
    test: float
    settings: dict[str, float]


def boosted(split: Split, *, tries: int, seed: int = 0) -> Iterator[Trees]:
    """The best trees after each of `tries` draws from the grid.

    Settings and the number of trees are chosen on the validation flights, as those of the DLRM are.
    The trees get the columns of the DLRM, NaN where something is unknown, and categories as such.
    """
    parts, categorical = _columns(split, seed)
    train, validation, test = zip(parts, split[:3], strict=True)
    grid = list(itertools.product(*GRID.values()))
    best = Trees(0.0, 0.0, {})
    for draw in np.random.default_rng(seed).choice(len(grid), size=tries, replace=False):
        settings = dict(zip(GRID, grid[draw], strict=True))
        model = HistGradientBoostingClassifier(
            **settings,
            max_iter=MOST_TREES,
            early_stopping=False,  # its own held-out part would be drawn from all months
            categorical_features=categorical,
            random_state=seed,
        )
        model.fit(train[0], train[1].late)
        scores = (_auc(validation[1], p) for p in model.staged_predict_proba(validation[0]))
        num_trees, score = max(enumerate(scores, 1), key=lambda found: found[1])
        if score > best.validation:
            staged = itertools.islice(model.staged_predict_proba(test[0]), num_trees - 1, None)
            settings["max_iter"] = num_trees
            best = Trees(score, _auc(test[1], next(staged)), settings)
        yield best


def _auc(flights: Flights, probabilities: np.ndarray) -> float:
    return float(roc_auc_score(flights.late, probabilities[:, 1]))


def _columns(split: Split, seed: int) -> tuple[list[np.ndarray], list[int]]:
    """The table of each part, and which of its columns are categories."""
    many = [name for name in CATEGORICAL if split.num_rows[name] > MOST_CATEGORIES]
    few = [name for name in CATEGORICAL if name not in many]
    encoder = TargetEncoder(target_type="binary", random_state=seed)
    with warnings.catch_warnings():
        # scikit-learn 1.9 asks for a splitter in place of the seed, which older ones do not take.
        warnings.simplefilter("ignore", FutureWarning)
        encoded = [encoder.fit_transform(_stacked(split.train, many), split.train.late)]
    encoded += [encoder.transform(_stacked(part, many)) for part in split[1:3]]
    parts = []
    for part, numbers in zip(split[:3], encoded, strict=True):
        earlier = np.where(part.ids["earlier"] < 0, np.nan, part.ids["earlier"])
        parts.append(np.concatenate([part.dense, numbers, _stacked(part, few), earlier], axis=1))
    first = split.train.dense.shape[1] + len(many)
    return parts, list(range(first, parts[0].shape[1]))


def _stacked(flights: Flights, names: list[str]) -> np.ndarray:
    return np.stack([flights.ids[name] for name in names], axis=1)
