"""The state dict of a wrapper: its entries besides the parameters, and loading them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._places import Places
from ._replica import Replica, State, Whole
from .slow_momentum import Rates, SlowMomentum, SlowSteps

# Names of FairScale; all other entries have `_PREFIX`. All values are tensors.
_FAIRSCALE = ("ps_weight", "is_sgp_ps_numerator")
_PREFIX = "slowmo."
_RATES = ("rates", "made_at", "since")  # the fields of `Rates`
_SLOW = ("anchor", "velocity", *_RATES, "ends", "whole_anchor", "whole_velocity", "initial")
_WEIGHT_TOLERANCE = 1e-5


def entries_of(replica: Replica) -> dict[str, torch.Tensor]:
    """Return the wrapper's own entries of the state dict.

    Returns:
      With SGP ps_weight (1,) float32 and is_sgp_ps_numerator () bool. Always slowmo.num_updates,
      .exchanges, .rank, .world_size () int64. With slow momentum slowmo.anchor and .velocity
      (shard,) float32, .rates, .made_at and .since (groups,) float64, .ends (groups,) int64. Before
      slow momentum starts, but after a forward pass, slowmo.initial (N + 1,) float32, the initial
      parameters.
    """
    state = replica.state()
    entries: dict[str, Any] = {
        "num_updates": state.num_updates,
        "exchanges": state.exchanges,
        "rank": replica.places.rank,
        "world_size": replica.places.world_size,
    }
    slow = state.momentum
    if slow is not None:
        rates = (slow.rates.last, slow.rates.made_at, slow.rates.since)
        rates = [torch.tensor(value, dtype=torch.float64) for value in rates]
        entries |= {"ends": slow.span.ends, **dict(zip(_RATES, rates, strict=True))}
        entries |= {"anchor": slow.anchor, "velocity": slow.velocity}
    elif state.initial is not None:
        entries["initial"] = state.initial
    named = {_PREFIX + key: _tensor(value) for key, value in entries.items()}
    if replica.push_sum.is_on:
        named["ps_weight"] = state.weight
        named["is_sgp_ps_numerator"] = torch.tensor(state.is_numerator)
    return named


def consolidated(
    state_dict: Mapping[str, Any],
    params: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    whole: Whole,
) -> dict[str, Any]:
    """Return a state dict that fits every rank of any number of processes.

    Args:
      state_dict: the wrapper's state dict, made with `keep_vars=True`.
      params: parameters in it, in the order of `whole.params`.
      buffers: buffers in it, in the order of `whole.buffers`.
      whole: the values that replace both.
    """
    values = [*whole.params, *whole.buffers]
    replaced = dict(zip(map(id, [*params, *buffers]), values, strict=True))
    state = {}
    for key, value in state_dict.items():
        value = replaced.get(id(value), value)
        state[key] = value.detach() if isinstance(value, torch.Tensor) else value
    for name in ("rank", "world_size", "anchor", "velocity"):
        state.pop(_PREFIX + name, None)
    if "ps_weight" in state:
        state |= {"ps_weight": torch.ones(1), "is_sgp_ps_numerator": torch.tensor(False)}
    for name, value in whole.slow.items():
        state[_PREFIX + (name if name == "initial" else f"whole_{name}")] = value
    return state


def take(
    state_dict: Mapping[str, Any], prefix: str, replica: Replica, *, has_slow_momentum: bool
) -> tuple[dict[str, Any], State, list[str]]:
    """Split a state dict into entries of others and the wrapper's own state, and check the latter.

    `state_dict` is not changed. The wrapper's entries may be missing: FairScale's dicts hold no
    counters and no slow momentum; both then start from zero.

    Returns:
      Entries of others; the state, on the host; names of entries that the wrapper cannot use.

    Raises:
      ValueError: slow momentum or a push-sum weight of another rank or number of processes, of
        another kind of wrapper, or of another size.
    """
    saved: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in state_dict.items():
        name = key.removeprefix(prefix)
        is_own = key.startswith(prefix) and (name in _FAIRSCALE or name.startswith(_PREFIX))
        (saved if is_own else others)[name if is_own else key] = value

    is_sgp = replica.push_sum.is_on
    unexpected = [] if is_sgp else [name for name in _FAIRSCALE if name in saved]
    if not has_slow_momentum:
        unexpected += [_PREFIX + key for key in _SLOW if _PREFIX + key in saved]
    entries = {
        name.removeprefix(_PREFIX): value
        for name, value in saved.items()
        if name.startswith(_PREFIX) and name not in unexpected
    }
    weight = torch.as_tensor(saved.get("ps_weight", torch.ones(1))).detach().float().reshape(1)
    weight_differs = is_sgp and abs(float(weight) - 1) > _WEIGHT_TOLERANCE
    if weight_differs and not replica.push_sum.moves:
        raise ValueError(
            f"`state_dict` holds a push-sum weight of {float(weight):.6g}, but with this `graph` "
            "and `mixing` weights are always 1; it belongs to others."
        )
    if weight_differs or "anchor" in entries or "initial" in entries:
        _check_place(entries, replica.places)
    state = State(
        num_updates=int(entries.get("num_updates", 0)),
        exchanges=int(entries.get("exchanges", 0)),
        momentum=_read_momentum(entries, replica.slow) if "ends" in entries else None,
        initial=_copy(entries["initial"]) if "initial" in entries else None,
        weight=weight.cpu().clone(),
        is_numerator=bool(saved.get("is_sgp_ps_numerator", False)),
    )
    return others, state, unexpected


def _check_place(entries: Mapping[str, Any], places: Places) -> None:
    """Raise `ValueError` if the dict says that another rank saved it.

    Raises:
      ValueError: it is another's.
    """
    if "rank" not in entries:
        return
    saved = int(entries["rank"]), int(entries["world_size"])
    current = places.rank, places.world_size
    if saved != current:
        raise ValueError(
            f"`state_dict` was saved by rank {saved[0]} of {saved[1]} processes and holds that "
            f"rank's part of the state; this is rank {current[0]} of {current[1]}. Load the dict "
            "that this rank saved, or one that consolidated_state_dict() made, which fits every "
            "rank."
        )


def _read_momentum(entries: Mapping[str, Any], slow: SlowSteps) -> SlowMomentum:
    span = slow.span(tuple(entries["ends"].tolist()))
    # Older dicts have no rates before the first slow step, and no rates for the bound. With an
    # unknown rate the next slow step carries at most the whole velocity.
    unknown = [0.0] * len(span.ends)
    saved = (entries[name].tolist() if name in entries else [] for name in _RATES)
    rates = Rates(*(values or unknown for values in saved))
    if "anchor" in entries:
        anchor, velocity = entries["anchor"], entries["velocity"]
        if anchor.numel() != span.length:
            raise ValueError(
                f"`state_dict` holds {anchor.numel()} elements of slow momentum, but with "
                f"`slowmo_memory_efficient`={slow.is_sharded} this wrapper keeps "
                f"{span.length}; build it with the value that the saved one had, or load a dict "
                "that consolidated_state_dict() made."
            )
    else:
        anchor, velocity = (span.part_of(entries["whole_" + k]) for k in ("anchor", "velocity"))
    return SlowMomentum(span, _copy(anchor), _copy(velocity), rates)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host; `perform_slowmo` moves it to the device."""
    return value.detach().to("cpu", torch.float32, copy=True)


def _tensor(value: Any) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)


class SavesReplica(torch.nn.Module):
    """A module whose state dict contains its replica's state."""

    _replica: Replica
    slowmo: bool

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(
            {prefix + key: value for key, value in entries_of(self._replica).items()}
        )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load; raise `ValueError` for the state of another rank or number of processes."""
        others, state, unexpected = take(
            state_dict, prefix, self._replica, has_slow_momentum=self.slowmo
        )
        unexpected_keys.extend(prefix + key for key in unexpected if strict)
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._replica.take_over(state)
