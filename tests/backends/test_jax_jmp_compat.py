"""jmp's behaviour through polyamp: jmp's own tests, jmp side by side, and what differs."""

from __future__ import annotations

import unittest

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import polyamp  # noqa: E402
from polyamp_jax import jmp_compat as ours  # noqa: E402

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


@pytest.fixture
def jmp():
    return pytest.importorskip("jmp", reason="jmp is not installed")


class TestJmpItself:
    # jmp's test divides a float32 by 3**100.
    @pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
    @pytest.mark.parametrize(("module", "count"), [("policy_test", 60), ("loss_scale_test", 15)])
    def test_its_own_tests_pass(self, module, count, monkeypatch):
        home = f"jmp._src.{module}"
        tests = pytest.importorskip(home, reason="jmp or its tests are not installed")
        monkeypatch.setattr(tests, "jmp", ours)
        suite = unittest.defaultTestLoader.loadTestsFromModule(tests)
        result = unittest.TestResult()
        suite.run(result)
        assert result.failures == result.errors == []
        assert result.testsRun >= count

    def test_every_public_name_is_there(self, jmp):
        assert [name for name in jmp.__all__ if not hasattr(ours, name)] == []

    @pytest.mark.parametrize(
        "text",
        [
            *("f16", "bf16", "full", "half", "f32", "float16", "bfloat16", "float32", "f64"),
            *("c=f16", "p=f16,c=f16", "p=f16,c=bf16", "p=bf16", "o=f16", "c=half,o=full"),
            *("params=float32,compute=float16,output=float32", "compute=bf16", "output=f32,p=f16"),
        ],
    )
    def test_same_policies(self, jmp, text):
        theirs, mine = jmp.get_policy(text), ours.get_policy(text)
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            assert getattr(mine, field) is getattr(theirs, field)
        assert str(mine) == str(theirs)

    def test_same_scales_over_random_steps(self, jmp):
        finite = np.random.default_rng(0).random(600) > 0.1
        for start, period, factor in [(2.0**15, 3, 2), (4.0, 1, 4), (2.0**127, 2, 2)]:
            theirs = jmp.DynamicLossScale(jnp.float32(start), period=period, factor=factor)
            mine = ours.DynamicLossScale(jnp.float32(start), period=period, factor=factor)
            step_theirs, step_mine = (jax.jit(lambda s, f: s.adjust(f)) for _ in range(2))
            for flag in finite:
                theirs, mine = step_theirs(theirs, flag), step_mine(mine, flag)
                assert (float(mine.loss_scale), int(mine.counter)) == (
                    float(theirs.loss_scale),
                    int(theirs.counter),
                )

    def test_same_dtypes_and_values_when_scaling(self, jmp):
        tree = {"f16": jnp.ones(2, F16), "f32": jnp.full(2, 3.0), "i": jnp.arange(2), "n": None}
        pairs = [
            (jmp.StaticLossScale(128), ours.StaticLossScale(128)),
            (jmp.DynamicLossScale(jnp.float32(8)), ours.DynamicLossScale(jnp.float32(8))),
            (jmp.NoOpLossScale(), ours.NoOpLossScale()),
        ]
        for theirs, mine in pairs:
            for do in ("scale", "unscale"):
                left, right = getattr(theirs, do)(tree), getattr(mine, do)(tree)
                assert jax.tree.map(lambda x: x.dtype, left) == jax.tree.map(
                    lambda x: x.dtype, right
                )
                jax.tree.map(np.testing.assert_array_equal, left, right)


class TestPolicy:
    def test_casts_arrays_and_nothing_else(self):
        policy = ours.get_policy("p=f32,c=f16,o=bf16")
        key = object()
        tree = {"x": np.ones(2), "i": jnp.arange(3), "k": key, "n": None, "s": 1.5}
        out = policy.cast_to_compute(tree)
        assert out["x"].dtype == F16
        assert out["i"].dtype == jnp.int32
        assert out["k"] is key
        assert out["s"] == 1.5
        assert policy.cast_to_output(out)["x"].dtype == BF16
        assert policy.cast_to_param(out)["x"].dtype == F32

    @pytest.mark.parametrize("text", ["compute_float16", "q=f16", "p=f17", "p=fp8_e5m2", "", "p="])
    def test_refuses(self, text):
        with pytest.raises(ValueError, match=r"Unknown|cannot apply"):
            ours.get_policy(text)

    def test_with_output_dtype(self):
        assert ours.get_policy("f16").with_output_dtype(F32) == ours.Policy(F16, F16, F32)


class TestDynamic:
    def test_grows_on_the_nth_finite_step(self):
        scale = ours.DynamicLossScale(jnp.float32(8), period=3)
        seen = []
        for _ in range(7):
            scale = scale.adjust(jnp.bool_(True))
            seen.append((float(scale.loss_scale), int(scale.counter)))
        assert seen == [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (32, 0), (32, 1)]

    def test_floor_survives_jit_and_scan(self):
        start = ours.DynamicLossScale(jnp.float32(1), min_loss_scale=jnp.float32(2.0**-10))
        last, _ = jax.jit(
            lambda s: jax.lax.scan(lambda s, f: (s.adjust(f), None), s, jnp.zeros(50, bool))
        )(start)
        assert float(last.loss_scale) == 2.0**-10
        assert float(last.min_loss_scale) == 2.0**-10

    def test_float16_scale_becomes_float32(self):
        assert ours.DynamicLossScale(jnp.float16(4)).loss_scale.dtype == F32

    def test_never_infinite_and_never_zero(self):
        top = ours.DynamicLossScale(jnp.float32(2.0**127), period=1).adjust(jnp.bool_(True))
        assert float(top.loss_scale) == 2.0**127
        low = ours.DynamicLossScale(jnp.float32(2.0**-126), min_loss_scale=jnp.float32(0))
        assert float(low.adjust(jnp.bool_(False)).loss_scale) == 2.0**-126

    def test_a_counter_past_the_period_still_grows(self):
        scale = ours.DynamicLossScale(jnp.float32(8), jnp.int32(10), period=3)
        assert float(scale.adjust(jnp.bool_(True)).loss_scale) == 16

    def test_bad_parameters(self):
        with pytest.raises(polyamp.RuleError, match="growth_factor"):
            ours.DynamicLossScale(jnp.float32(8), factor=1).adjust(jnp.bool_(True))
        with pytest.raises(AssertionError, match="expected boolean scalar"):
            ours.DynamicLossScale(jnp.float32(8)).adjust(jnp.ones(2, bool))


class TestTrees:
    def test_one_nan_among_many(self):
        tree = [jnp.zeros((64, 64)), jnp.zeros((64, 64)).at[3, 7].set(jnp.nan)]
        assert not ours.all_finite(tree)
        assert ours.all_finite([tree[0], jnp.arange(3), np.zeros(2, jax.dtypes.float0)])

    def test_select_takes_no_nan_from_the_other_branch(self):
        out = ours.select_tree(jnp.bool_(False), {"a": jnp.nan}, {"a": jnp.float32(2)})
        assert float(out["a"]) == 2
