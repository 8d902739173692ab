"""Configuration of `jaxslowmo compare`."""

import dataclasses
import typing
from typing import Any, get_type_hints

from ._algorithms import ALGORITHMS, AlgorithmConfig
from ._fields import Checked, check_different, option, parse_integers, parse_names
from ._train import MOST_SEEDS, TrainConfig
from ._unused import check_setting


@dataclasses.dataclass(frozen=True)
class CompareConfig(Checked):
    """Several algorithms, each trained with every seed; all else is equal.

    An algorithm may bring settings of its own: "sgp+overlap=1+graph=ring".
    """

    train: TrainConfig
    algorithms: tuple[str, ...] = option(
        "all_reduce,local_sgd,slowmo",
        "Separated by commas; the ratios are to the first. Each may bring settings: "
        "sgp+overlap=1+graph=ring.",
        parse=parse_names,
    )
    seeds: tuple[int, ...] = option("0", "Separated by commas.", parse=parse_integers)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_different("--algorithms", self.algorithms)
        check_different("--seeds", self.seeds)
        unknown = [name for name in self.base_algorithms if name not in ALGORITHMS]
        if unknown:
            raise ValueError(
                f"--algorithms must be of {', '.join(ALGORITHMS)}, got {', '.join(unknown)}"
            )
        if min(self.seeds) < 0:
            raise ValueError(f"--seeds must be >= 0, got {min(self.seeds)}")
        if max(self.seeds) >= MOST_SEEDS:
            raise ValueError(f"--seeds must be < {MOST_SEEDS}, got {max(self.seeds)}")
        for algorithm in self.algorithms:
            try:
                self.run(algorithm, self.seeds[0])  # its settings are checked, too
            except ValueError as error:
                raise ValueError(f"--algorithms {algorithm}: {error}") from None

    @property
    def base_algorithms(self) -> tuple[str, ...]:
        """The algorithms without their settings."""
        return tuple(algorithm.partition("+")[0] for algorithm in self.algorithms)

    def run(self, algorithm: str, seed: int) -> TrainConfig:
        """The configuration of one of the runs."""
        name, *settings = algorithm.split("+")
        changes = dict(_setting(text) for text in settings)
        for setting, value in changes.items():
            check_setting(name, setting, value)
        return dataclasses.replace(
            self.train,
            seed=seed,
            algorithm=dataclasses.replace(self.train.algorithm, algorithm=name, **changes),
        )


def _setting(text: str) -> tuple[str, Any]:
    """Name and value of "overlap=1"."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    hints = get_type_hints(AlgorithmConfig)
    if not equals or name == "algorithm" or name not in hints:
        known = ", ".join(key for key in hints if key != "algorithm")
        raise ValueError(f"settings are written name+SETTING=VALUE with {known}, got {text!r}")
    return name, _parse(name, hints[name], value)


def _parse(name: str, kind: Any, text: str) -> Any:
    kinds = set(typing.get_args(kind)) - {type(None)} or {kind}
    (kind,) = kinds
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name} must be of type {kind.__name__}, got {text!r}") from None
