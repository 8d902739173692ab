"""What transforms say that they do, for `js.spec`."""

from .transform import Reduction as Reduction
