"""`import polyamp.jax as amp`: the JAX face of polyamp (needs jax, flax and optax)."""
