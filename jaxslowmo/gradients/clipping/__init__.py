"""Gradients clipped by the norm of all of them together, wherever their parts are."""

from ._clip import ClipByGlobalNormState as ClipByGlobalNormState
from ._clip import clip_by_global_norm as clip_by_global_norm
