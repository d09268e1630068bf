"""The JAX backend: `import polyamp.jax as amp`."""

NAME = "jax"
