"""Mixing weights as options give them."""

from jaxslowmo.topology import Mixing, self_weighted, uniform_mixing


def parse_mixing(text: str) -> Mixing:
    """The mixing that "uniform" or "self_weighted:0.7" stands for.

    Raises:
        ValueError: for anything else, or a share outside (0, 1).
    """
    name, colon, share = text.partition(":")
    if name == "uniform" and not colon:
        return uniform_mixing()
    if name == "self_weighted":
        try:
            return self_weighted(float(share))
        except ValueError:
            pass  # no number, or none between 0 and 1
    raise ValueError(
        "--mixing must be uniform, or self_weighted:SHARE with a share between 0 and 1, such as "
        f"self_weighted:0.7; got {text}"
    )
