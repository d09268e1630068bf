"""Parameters split over an axis of shard_map: cases for `jax_sharded_cases`, on 4 host devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import polyamp
import polyamp.jax as amp

INF = float("inf")
RULE = polyamp.Dynamic(init_scale=8.0)
X = jnp.arange(16.0, dtype=jnp.float16).reshape(4, 4)
"""A batch of 4 samples; the gradient of the model here is their mean, 6 7 8 9."""


def mesh_of(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))


def scaled(**how):
    return amp.loss_scaled(optax.sgd(1.0, momentum=0.9), RULE, **how)


def specs(tree, axis):
    """Arrays with a shape are split over `axis`, scalars are replicated."""
    return jax.tree.map(lambda leaf: P(axis) if leaf.ndim else P(), tree)


def told(params, state, applied):
    """Parameters, scale, skips, the momentum, and which devices found the step applied."""
    scaler = amp.scaler_state(state)
    momentum = optax.tree.get(state, "trace")
    arrays = (params, scaler.loss_scale, scaler.skipped, momentum, applied)
    return [jnp.asarray(a).tolist() for a in arrays]


def split_training(tx, mesh, param_axis, batch_axes, x, form, **options):
    """A step with one part of the parameters and one share of the batch on each device."""

    def loss_fn(part, x):
        whole = jax.lax.all_gather(part.astype(jnp.float16), param_axis, tiled=True)
        return (x @ whole).astype(jnp.float32).sum() / jax.lax.axis_size(param_axis)

    def train(part, state, x):
        loss, grads = amp.value_and_grad(loss_fn)(state, part, x)
        if form == "step":
            part, new = amp.step(tx, grads, state, part, loss=loss)
        else:
            updates, new = tx.update(grads, state, part)
            part = optax.apply_updates(part, updates)
        applied = amp.decision(state, new).applied
        return part, new, jnp.broadcast_to(applied, (1,))

    params = jnp.zeros(4)
    state = tx.init(params)
    where = (P(param_axis), specs(state, param_axis))
    run = jax.shard_map(
        train,
        mesh=mesh,
        in_specs=(*where, P(batch_axes)),
        out_specs=(*where, P(batch_axes)),
        **options,
    )
    return told(*jax.jit(run)(params, state, x))


def fsdp(x, form, **options):
    """4 devices that split parameters and batch: the gradients come added up."""
    tx = scaled(agree_axis_name="d")
    return split_training(tx, mesh_of(d=4), "d", "d", x, form, **options)


def hsdp(x, form, **options):
    """2 groups of 2 devices: parameters are split inside a group, replicated over groups."""
    tx = scaled(axis_name="group", agree_axis_name=("d",))
    mesh = mesh_of(group=2, d=2)
    return split_training(tx, mesh, "d", ("group", "d"), x, form, **options)


def tensor_parallel(x, agree, **options):
    """Columns of a weight on each device, the whole batch on all: no gradient travels."""
    tx = scaled(agree_axis_name="d" if agree else None)

    def loss_fn(part, x):
        return (x * part.astype(x.dtype)).astype(jnp.float32).sum()

    def train(part, state, x):
        _, grads = amp.value_and_grad(loss_fn)(state, part, x)
        part, new = amp.step(tx, grads, state, part)
        applied = amp.decision(state, new).applied
        return part, new, jnp.broadcast_to(applied, (1,))

    params = jnp.zeros(4)
    state = tx.init(params)
    where = (P("d"), specs(state, "d"))
    mesh = mesh_of(d=4)
    run = jax.shard_map(
        train, mesh=mesh, in_specs=(*where, P("d")), out_specs=(*where, P("d")), **options
    )
    return told(*jax.jit(run)(params, state, x))


def collectives(agree, with_loss):
    """How often a step agrees: names of the collectives in its jaxpr."""
    tx = scaled(axis_name=None if agree else "d", agree_axis_name="d" if agree else None)

    def one(grads, state):
        return tx.update(grads, state, loss=grads if with_loss else None)

    text = str(jax.make_jaxpr(one, axis_env=[("d", 4)])(jnp.ones(()), tx.init(jnp.ones(()))))
    return [text.count(f" {name}[") for name in ("psum", "pmin", "pmax")]


def found():
    """What each case found, by its name."""
    results = {}
    ways = {"vma": {}, "no vma": {"check_vma": False}}
    bad = X.at[2, 3].set(INF)
    for way, options in ways.items():
        for name, x in {"good": X, "bad": bad}.items():
            for form in ("step", "update"):
                results[f"fsdp {way} {form} {name}"] = fsdp(x, form, **options)
                results[f"hsdp {way} {form} {name}"] = hsdp(x, form, **options)
        results[f"tp {way} good"] = tensor_parallel(X[0], True, **options)
        results[f"tp {way} bad"] = tensor_parallel(bad[2], True, **options)
    results["tp alone bad"] = tensor_parallel(bad[2], False, check_vma=False)
    for agree in (False, True):
        for with_loss in (False, True):
            results[f"collectives {agree} {with_loss}"] = collectives(agree, with_loss)
    return results
