"""A model small enough that the command line's tests compile in seconds."""

from jaxslowmo.models import GPTConfig

TINY = GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=16)
