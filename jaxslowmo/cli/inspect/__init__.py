"""`jaxslowmo inspect`: what graphs cost and how fast they mix; without jax."""
