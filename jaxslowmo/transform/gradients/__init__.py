"""Gradient transforms: optax's pair, and what it says of itself to the training step."""

from ._spec import GradientSpec as GradientSpec
from ._spec import Reduction as Reduction
from ._spec import is_identity as is_identity
from ._spec import joined as joined
from ._spec import spec_of as spec_of
from ._transform import GradientTransform as GradientTransform
from ._transform import OwnReductionState as OwnReductionState
from ._transform import gradient_transform as gradient_transform
from ._validation import Validation as Validation
