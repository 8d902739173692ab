"""The state dict of a wrapper: its entries besides the parameters, and loading them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ._places import Places
from ._replica import Replica, is_continuous
from ._slow_momentum import Rates, SlowMomentum, SlowSteps
from ._start import unequal
from .backends import Kind

# Names of FairScale; all other entries have `_PREFIX`. All values are tensors.
_FAIRSCALE = ("ps_weight", "is_sgp_ps_numerator")
_PREFIX = "slowmo."
_INITIAL = "initial."
_RATES = ("rates", "made_at", "since")  # the fields of `Rates`
_SLOW = ("anchor", "velocity", *_RATES, "names", "whole_anchor", "whole_velocity")
_WEIGHT_TOLERANCE = 1e-5


def entries_of(replica: Replica) -> dict[str, torch.Tensor]:
    """Return the wrapper's own entries of the state dict.

    Returns:
      With SGP ps_weight (1,) float32 and is_sgp_ps_numerator () bool. Always slowmo.num_updates,
      .exchanges, .rank, .world_size () int64. With slow momentum slowmo.anchor and .velocity
      (shard,) float32, .rates, .made_at and .since (parameters,) float64, and .names, the names of
      the parameters in it as text in UTF-8, (bytes,) uint8, one name per line. For parameters that
      have no anchor yet slowmo.initial.<name> (n,) float32, their first values. After a forward
      pass slowmo.exchanged, the names of the parameters that are exchanged, as text.
    """
    entries: dict[str, Any] = {
        "num_updates": replica.collectives.num_updates,
        "exchanges": replica.averaging.exchanges,
        "rank": replica.places.rank,
        "world_size": replica.places.world_size,
    }
    if replica.names:
        entries["exchanged"] = _text(sorted(replica.names))
    slow = replica.slow.momentum
    if slow is not None:
        rates = [torch.tensor(value, dtype=torch.float64) for value in vars(slow.rates).values()]
        entries |= {"names": _text(slow.span.names), **dict(zip(_RATES, rates, strict=True))}
        entries |= {"anchor": slow.anchor, "velocity": slow.velocity}
    entries |= {_INITIAL + name: value for name, value in replica.slow.initial.items()}
    named = {_PREFIX + key: torch.as_tensor(value).detach() for key, value in entries.items()}
    if replica.push_sum.is_on:
        named["ps_weight"] = replica.push_sum.weight
        named["is_sgp_ps_numerator"] = torch.tensor(replica.push_sum.is_numerator)
    return named


def consolidate(
    state_dict: Mapping[str, Any],
    module: torch.nn.Module,
    replica: Replica,
    device: torch.device,
    *,
    for_resuming: bool,
) -> dict[str, Any]:
    """Return a state dict that fits every rank of any number of processes.

    Args:
      state_dict: the wrapper's state dict, made with `keep_vars=True`.
      module: the wrapper's module.
      replica: the wrapper's replica.
      device: the device of this process.
      for_resuming: whether it is for the wrapper, else for the module.

    Communication: that of `unequal` for frozen parameters, and that of `Replica.whole`.
    """
    params = dict(module.named_parameters())
    exchanged = replica.exchanged_params(params)
    frozen = {name: param for name, param in params.items() if name not in exchanged}
    # forward() may write to frozen parameters, such as those of a target network.
    written = unequal(frozen, replica.collectives, device, Kind.CONSOLIDATION)
    buffers = [*module.buffers(), *(frozen[name] for name in written)]
    means, first, slow = replica.whole(exchanged, buffers, device)
    replaced = {id(params[name]): value for name, value in means.items()}
    replaced |= dict(zip(map(id, buffers), first, strict=True))
    state = {}
    for key, value in state_dict.items():
        value = replaced.get(id(value), value)
        state[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    if not for_resuming:
        inner = {key: value for key, value in state.items() if key.startswith("module.")}
        # A module that torch.compile made has a prefix of its own.
        names = {key: key.removeprefix("module.").replace("_orig_mod.", "") for key in inner}
        return {names[key]: value for key, value in inner.items()}
    local = ("rank", "world_size", "anchor", "velocity", "exchanged")
    state = {key: value for key, value in state.items() if key.removeprefix(_PREFIX) not in local}
    if "ps_weight" in state:
        ones = torch.ones(1, dtype=torch.float32)
        state |= {"ps_weight": ones, "is_sgp_ps_numerator": torch.tensor(False)}
    for name, value in slow.items():
        state[_PREFIX + (name if name.startswith(_INITIAL) else f"whole_{name}")] = value.cpu()
    return state


def take(
    state_dict: Mapping[str, Any],
    prefix: str,
    replica: Replica,
    module: torch.nn.Module,
    *,
    has_slow_momentum: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Resume from the wrapper's own entries of a state dict, which is not changed.

    They may be missing: FairScale's dicts hold no counters and no slow momentum; both then start
    from zero. Tensors may stay on the host until they are needed.

    Returns:
      Entries of others; names of entries that the wrapper cannot use.

    Raises:
      ValueError: slow momentum or a push-sum weight of another rank or number of processes, of
        another kind of wrapper, or of another size. Then nothing has changed.
    """
    saved: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in state_dict.items():
        name = key.removeprefix(prefix)
        is_own = key.startswith(prefix) and (name in _FAIRSCALE or name.startswith(_PREFIX))
        (saved if is_own else others)[name if is_own else key] = value

    push_sum, params = replica.push_sum, dict(module.named_parameters())
    unexpected = [] if push_sum.is_on else [name for name in _FAIRSCALE if name in saved]
    if not has_slow_momentum:
        own = tuple(_PREFIX + key for key in (*_SLOW, _INITIAL))
        unexpected += [name for name in saved if name.startswith(own)]
    entries = {
        name.removeprefix(_PREFIX): value
        for name, value in saved.items()
        if name.startswith(_PREFIX) and name not in unexpected
    }
    weight = torch.as_tensor(saved.get("ps_weight", torch.ones(1))).detach().float().reshape(1)
    weight_differs = push_sum.is_on and abs(float(weight) - 1) > _WEIGHT_TOLERANCE
    if weight_differs and not push_sum.moves:
        raise ValueError(
            f"`state_dict` must have a push-sum weight of 1 with this `graph` and `mixing`, got "
            f"{float(weight):.6g}."
        )
    initial = {
        name.removeprefix(_INITIAL): _copy(value)
        for name, value in entries.items()
        if name.startswith(_INITIAL)
    }
    if weight_differs or "anchor" in entries or initial:
        _check_place(entries, replica.places)
    has_momentum = "anchor" in entries or "whole_anchor" in entries
    sizes = {name: param.numel() for name, param in params.items()}
    momentum = _read_momentum(entries, replica.slow, sizes) if has_momentum else None

    replica.collectives.num_updates = int(entries.get("num_updates", 0))
    replica.averaging.exchanges = int(entries.get("exchanges", 0))
    replica.slow.resume(momentum, initial)
    exchanged = set(_names(entries.get("exchanged")))
    # FairScale exchanges all.
    replica.names = frozenset(
        n for n, p in params.items() if (n in exchanged if entries else is_continuous(p))
    )
    if push_sum.is_on:
        push_sum.weight = weight.cpu().clone()
        push_sum.is_numerator = bool(saved.get("is_sgp_ps_numerator", False))
    return others, unexpected


def _check_place(entries: Mapping[str, Any], places: Places) -> None:
    """Raise `ValueError` if the dict says that another rank saved it."""
    if "rank" not in entries:
        return
    saved = int(entries["rank"]), int(entries["world_size"])
    current = places.rank, places.world_size
    if saved != current:
        raise ValueError(
            f"`state_dict` is that of rank {saved[0]} of {saved[1]}; this is rank {current[0]} of "
            f"{current[1]}: load its own, or one of consolidated_state_dict()."
        )


def _read_momentum(
    entries: Mapping[str, Any], slow: SlowSteps, sizes: Mapping[str, int]
) -> SlowMomentum:
    names = _names(entries.get("names"))
    foreign = [name for name in names if name not in sizes]
    if foreign or not names:
        raise ValueError(
            "`state_dict` must hold slow momentum of parameters of this module, got "
            + (f"that of {foreign[0]!r}." if foreign else "some without `slowmo.names`.")
        )
    span = slow.span({name: sizes[name] for name in names})
    rates = Rates(*(entries[name].tolist() for name in _RATES))
    if "anchor" in entries:
        anchor, velocity = entries["anchor"], entries["velocity"]
        if anchor.numel() != span.length:
            raise ValueError(
                f"`state_dict` must hold {span.length} elements of slow momentum with "
                f"`slowmo_memory_efficient`={slow.is_sharded}, got {anchor.numel()}."
            )
    else:
        anchor, velocity = (span.part([entries["whole_" + k]]) for k in ("anchor", "velocity"))
    return SlowMomentum(span, _copy(anchor), _copy(velocity), rates)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host; `perform_slowmo` moves it to the device."""
    return value.detach().to("cpu", torch.float32, copy=True)


def _text(names: Iterable[str]) -> torch.Tensor:
    return torch.tensor([*"\n".join(names).encode()], dtype=torch.uint8)


def _names(text: torch.Tensor | None) -> list[str]:
    return [] if text is None else bytes(text.tolist()).decode().splitlines()


class SavesReplica(torch.nn.Module):
    """A module whose state dict contains its replica's state."""

    module: torch.nn.Module
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
        others, unexpected = take(
            state_dict, prefix, self._replica, self.module, has_slow_momentum=self.slowmo
        )
        unexpected_keys.extend(prefix + key for key in unexpected if strict)
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
