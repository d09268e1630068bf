"""Runs on 4 host devices, in a process of its own: prints what each case found as JSON."""

from __future__ import annotations

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import warnings

import jax
import jax.numpy as jnp
import jax_split_cases
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
import polyamp.jax as amp
from polyamp_jax import reduce

NAN, INF = float("nan"), float("inf")
RULE = polyamp.Dynamic(init_scale=8.0)
TX = amp.loss_scaled(optax.sgd(1.0, momentum=0.9), RULE, axis_name="d")


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4,), ("d",), axis_types=(kind,))


def told(params, state, *more):
    """Numbers of each device, or of the whole array."""
    scaler = amp.scaler_state(state)
    arrays = (params, scaler.loss_scale, scaler.skipped, scaler.reason, *more)
    return [jnp.asarray(a).tolist() for a in arrays]


def local_loss(param, x):
    """Its gradient is x, computed in float16, times the scale."""
    return (param.astype(jnp.float16) * x).astype(jnp.float32).sum()


def train(param, state, x, use_loss=True):
    """One step on this device's share of the batch."""
    loss, grads = amp.value_and_grad(local_loss)(state, param, x[0])
    param, state = amp.step(TX, grads, state, param, loss=loss if use_loss else None)
    return param, state


def in_shard_map(x, **options):
    run = jax.shard_map(
        train, mesh=mesh(), in_specs=(P(), P(), P("d")), out_specs=(P(), P()), **options
    )
    param = jnp.zeros(())
    return told(*jax.jit(run)(param, TX.init(param), x))


def in_pmap(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        param = jnp.zeros(4)
        states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), TX.init(jnp.zeros(())))
        return told(*jax.pmap(train, axis_name="d")(param, states, x[:, None]))


def update_in_shard_map(grads, **options):
    """`update` on gradients that differ between devices, as `pmap` or a hand-written loop has."""

    def one(state, grad):
        updates, state = TX.update(grad[0], state, jnp.zeros(()))
        return updates, state

    run = jax.shard_map(one, mesh=mesh(), in_specs=(P(), P("d")), out_specs=(P(), P()), **options)
    return told(*jax.jit(run)(TX.init(jnp.zeros(())), grads))


def under_jit(kind, form):
    """Sharded parameters, moments and batch: types stay, values are those of one device."""
    tx = amp.loss_scaled(optax.adamw(1e-2), polyamp.Dynamic(init_scale=4.0))

    def loss_fn(params, x):
        return jnp.mean((x * params["w"] + params["b"]) ** 2)

    def one(params, state, x):
        loss, grads = amp.value_and_grad(loss_fn)(state, params, x)
        if form == "step":
            return amp.step(tx, grads, state, params, loss=loss)
        updates, state = tx.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state

    def run(where):
        x = jnp.arange(32.0).reshape(4, 8) / 8
        params = {"w": jnp.ones((4, 8)), "b": jnp.zeros((4, 8))}
        batches = [x, x.at[2, 3].set(NAN), x]
        if where is not None:
            params, *batches = jax.device_put((params, *batches), where)
        state, jitted, stable = tx.init(params), jax.jit(one), []
        for batch in batches:
            before = jax.tree.map(jax.typeof, (params, state))
            params, state = jitted(params, state, batch)
            stable.append(jax.tree.map(jax.typeof, (params, state)) == before)
        return params, state, stable, jitted._cache_size()

    with jax.set_mesh(mesh(kind)):
        params, state, stable, compiled = run(NamedSharding(jax.sharding.get_mesh(), P("d", None)))
        found = jax.device_get((params, state))
    alone = jax.device_get(run(None)[:2])
    close = jax.tree.map(lambda a, b: bool(abs(a - b).max() <= 1e-6), alone, found)
    return {
        "as on one device": all(jax.tree.leaves(close)),
        "types stay": all(stable),
        "skipped": int(state.scaler.skipped),
        "compiled": compiled,
        "devices": len(params["w"].sharding.device_set),
        "moments": str(optax.tree.get(state, "mu")["w"].sharding.spec),
    }


def agreed():
    """`reduce` of one bad device of four."""

    def one(x):
        signal = polyamp.Signal(x[0] < 3, True, x[0], jnp.float32(0.25))
        return reduce(signal, "d")._replace(loss_finite=jnp.asarray(True))

    run = jax.shard_map(one, mesh=mesh(), in_specs=P("d"), out_specs=P())
    return [float(v) for v in jax.jit(run)(jnp.arange(4.0))]


def averaged(x):
    """`pmean` of float16, complex and whole numbers."""

    def one(share):
        grads = {"half": share[0], "complex": share[0].astype(jnp.complex64), "count": jnp.int32(7)}
        return amp.pmean(grads, "d")

    run = jax.shard_map(one, mesh=mesh(), in_specs=P("d"), out_specs=P())
    found = jax.jit(run)(x)
    return [float(found["half"]), float(found["complex"].real), int(found["count"])]


def dynamic_scale(x):
    def one(scale, param, share):
        return scale.value_and_grad(local_loss, axis_name="d")(param, share[0])

    out = (P(), P(), P("d"), P())

    def flat(*args):
        scale, finite, loss, grad = one(*args)
        return scale, finite, loss[None], grad

    run = jax.shard_map(flat, mesh=mesh(), in_specs=(P(), P(), P("d")), out_specs=out)
    scale, finite, _, grad = jax.jit(run)(amp.DynamicScale(scale=8.0), jnp.zeros(()), x)
    return [bool(finite), float(scale.scale), float(grad)]


def main():
    large = jnp.full(4, 3750.0, jnp.float16)  # 30000 at a scale of 8
    mixed = jnp.array([1.0, 2.0, 3.0, 6.0], jnp.float16)
    bad = mixed.at[2].set(INF)
    found = {"devices": jax.device_count(), "agreed": agreed(), **jax_split_cases.found()}
    for name, x in {"large": large, "mixed": mixed, "bad": bad}.items():
        found[f"vma {name}"] = in_shard_map(x)
        found[f"no vma {name}"] = in_shard_map(x, check_vma=False)
        found[f"pmap {name}"] = in_pmap(x)
        found[f"update {name}"] = update_in_shard_map(8 * x)
        found[f"update, no vma {name}"] = update_in_shard_map(8 * x, check_vma=False)
        found[f"averaged {name}"] = averaged(8 * x)
        found[f"dynamic_scale {name}"] = dynamic_scale(x)
    for kind in (AxisType.Auto, AxisType.Explicit):
        for form in ("step", "update"):
            with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
                found[f"jit {kind.name} {form}"] = under_jit(kind, form)
    print(json.dumps(found))


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("strict"):
        main()
