"""Options that were given and that nothing would look at: refused, so that none is silent."""

from collections.abc import Collection, Mapping
from typing import Any

from ._algorithms import AlgorithmConfig
from ._fields import flag_of, options_of
from ._mesh import MeshConfig
from ._train import TrainConfig, train_options

_OF_STAGES = ("pipeline", "microbatches", "chunks", "executor")


def refuse_unused(
    given: Mapping[str, Any], config: TrainConfig, algorithms: Collection[str] = ()
) -> None:
    """Refuses options without an effect beside the others.

    Args:
      given: values by field name, of `TrainConfig` and its parts; None stands for not given.
      config: what came of them, with presets and defaults.
      algorithms: those that are trained; () is the one of `config`.

    Raises:
      ValueError: naming the first such option, what it goes with, and its value.
    """
    flat = config.flat()
    for name, (_, _, rule) in train_options().items():
        if given.get(name) is None or rule.goes_with is None:
            continue
        other, values = rule.goes_with
        there = set(algorithms) if other == "algorithm" and algorithms else {flat[other]}
        if not there & set(values):
            _refuse(*_as_typed(name, given[name]), other, values, there)
    for name in _OF_STAGES:
        if given.get(name) is not None and config.mesh.num_stages == 1:
            flag = flag_of(name, options_of(MeshConfig)[name][1])
            raise ValueError(f"{flag} goes with a stage of 2 or more in --mesh; got {given[name]}")
    saves = flat["checkpoint_every"] or flat["resume"]
    if given.get("on_nan") == "rollback" and not saves:
        raise ValueError("--on-nan rollback needs --checkpoint-every, for something to go back to")
    if given.get("shard_state") and not flat["exact_average"]:
        raise ValueError("--shard-state does not go with --no-exact-average, which shards nothing")
    if given.get("shard_state") and flat["codec"] != "none":
        raise ValueError(
            f"--shard-state does not go with --codec {flat['codec']}, which needs a whole anchor"
        )


def check_setting(algorithm: str, name: str, value: Any) -> None:
    """Of a comparison: refuses a setting of an algorithm that this does not use.

    Raises:
      ValueError: naming the setting, what it goes with, and its value.
    """
    goes_with = options_of(AlgorithmConfig)[name][1].goes_with
    if goes_with is not None and algorithm not in goes_with[1]:
        said = str(value).lower() if isinstance(value, bool) else value
        _refuse(name, f"; got {said}", *goes_with, {algorithm})


def _as_typed(name: str, value: Any) -> tuple[str, str]:
    """The option as it was given; a switch has no value to tell, but two names."""
    flag = flag_of(name, train_options()[name][2])
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}", ""
    return flag, f"; got {value}"


def _refuse(
    what: str, got: str, other: str, values: Collection[Any], there: Collection[Any]
) -> None:
    flag = flag_of(other, train_options()[other][2])
    if set(values) == {True}:
        raise ValueError(f"{what} goes with {flag}, which was not given{got}")
    wanted, found = " or ".join(map(str, values)), ", ".join(sorted(there))
    raise ValueError(f"{what} goes with {flag} {wanted}, not with {found}{got}")
