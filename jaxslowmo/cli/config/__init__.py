"""Configurations of the commands: frozen dataclasses whose fields are the options. No jax."""
