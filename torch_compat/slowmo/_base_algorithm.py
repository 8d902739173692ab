"""The algorithms that SlowMo can have under it."""

from enum import Enum


class SlowMoBaseAlgorithm(str, Enum):  # noqa: UP042  FairScale's prints its name
    """How the nodes come together between two slow steps."""

    LOCALSGD = "localsgd"
    SGP = "sgp"

    @classmethod
    def of(cls, value: object) -> "SlowMoBaseAlgorithm":
        """The member that `value`, a member or its string, names.

        Raises:
          ValueError: any other value.
        """
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise ValueError(
                f"`slowmo_base_algorithm` must be a SlowMoBaseAlgorithm or one of {names}, got "
                f"{value!r}."
            ) from None
