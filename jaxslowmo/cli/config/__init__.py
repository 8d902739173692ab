"""What the commands are given: frozen dataclasses whose fields are the options, without jax."""
