"""Settings of a module other than its tensors: modes, flags, numbers and names."""

from collections.abc import Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # names of the package are there without torch
    from torch import nn

_LONGEST = 16  # a longer tuple is data, not a setting


class Settings(NamedTuple):
    """Settings of a module at one time, or those that have changed since another time.

    Attributes:
      trained: maps a parameter's name to its `requires_grad`.
      attributes: maps path and name, such as "layers.0.training", to a plain value.
    """

    trained: Mapping[str, bool]
    attributes: Mapping[str, Any]

    @classmethod
    def from_module(cls, module: "nn.Module") -> "Settings":
        """Return the current settings of a module."""
        trained = {name: p.requires_grad for name, p in module.named_parameters()}
        return cls(trained, plain_attributes(module))

    def changes_since(self, before: "Settings") -> "Settings":
        """Return those that are new or have changed."""
        return Settings(*map(changed_values, before, self))

    def __bool__(self) -> bool:
        return bool(self.trained or self.attributes)

    def apply(self, module: "nn.Module") -> None:
        """Set a copy of the module alike; settings that the copy lacks are left out."""
        parameters, parts = dict(module.named_parameters()), dict(module.named_modules())
        for name in self.trained.keys() & parameters.keys():
            parameters[name].requires_grad_(self.trained[name])
        for path, value in self.attributes.items():
            part, _, name = path.rpartition(".")
            if part in parts:
                setattr(parts[part], name, value)


def plain_attributes(module: "nn.Module") -> dict[str, Any]:
    """Return the plain attributes of all parts of a module, by path and name."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if is_plain(value)
    }


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, None, or a short tuple of these."""
    if isinstance(value, tuple):
        return len(value) <= _LONGEST and all(map(is_plain, value))
    return value is None or isinstance(value, Number | str)


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values that are new in `now`, or not the same as before."""
    return {
        name: value
        for name, value in now.items()
        if name not in before or not _is_same(value, before[name])
    }


def _is_same(a: Any, b: Any) -> bool:
    if a is b or (a != a and b != b):  # NaN is not equal to itself
        return True
    return isinstance(a, bool) == isinstance(b, bool) and a == b
