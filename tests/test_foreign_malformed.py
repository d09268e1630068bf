"""Scalers of other systems that cannot be right: each refused with a `StateError`."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
from foreign_scalers import SCALERS
from hypothesis import given
from hypothesis import strategies as st
from test_foreign import MEGATRON, MEGATRON_CONFIG, STAGE0, TORCH, ZERO
from test_foreign_continuation import quiet

import polyamp
from polyamp import Dynamic, StateError, export_scaler, import_scaler

NOT_A_SCALE = [math.nan, math.inf, -1.0, True, "64", None, [64.0], 1e39, {}]
NOT_A_COUNT = [math.nan, 1.5, -1, True, "1", None, [1], 2**31]


@pytest.mark.parametrize("value", NOT_A_SCALE, ids=repr)
def test_a_wrong_scale(value: Any) -> None:
    for saved, key in ((TORCH, "scale"), (MEGATRON, "scale"), (ZERO, "cur_scale")):
        with pytest.raises(StateError, match="loss_scale must be a positive finite number"):
            quiet(import_scaler, {**saved, key: value})


@pytest.mark.parametrize("value", NOT_A_COUNT, ids=repr)
def test_a_wrong_count(value: Any) -> None:
    for saved, key in ((TORCH, "_growth_tracker"), (MEGATRON, "growth_tracker")):
        with pytest.raises(StateError, match="must be an integer"):
            quiet(import_scaler, {**saved, key: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"last_overflow_iter": 9}, "last_overflow_iter 9 is not before cur_iter 9"),
        ({"scale_window": 0}, "scale_window must be at least 1"),
        ({"cur_hysteresis": 0}, "left must be an integer from 1"),
        ({"delayed_shift": 0}, "hysteresis must be an integer from 1"),
        ({"scale_factor": 1.0}, "scale_factor must be a number above 1"),
        ({"consecutive_hysteresis": "no"}, "consecutive_hysteresis must be true or false"),
        ({"min_scale": -1.0}, "min_scale must be between"),
    ],
    ids=str,
)
def test_wrong_values_of_deepspeed(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        quiet(import_scaler, {**ZERO, **change})


@pytest.mark.parametrize("kind", SCALERS, ids=lambda k: k.__name__)
@given(data=st.data())
def test_any_value_in_any_place_is_read_or_refused(kind: Any, data: st.DataObject) -> None:
    saved = kind().save()
    inner = next((v for v in saved.values() if isinstance(v, dict)), saved)
    key = data.draw(st.sampled_from(sorted(inner)))
    junk = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
    )
    inner[key] = data.draw(junk)
    if data.draw(st.booleans()):
        del inner[key]
    try:
        rule, state = quiet(import_scaler, saved, kind.system, rule=kind.config)
    except StateError:
        return
    assert polyamp.scaler_from_dict(polyamp.scaler_to_dict(rule, state)) == (rule, state)


@pytest.mark.parametrize("source", [None, 3, [], int, b"{}"], ids=repr)
def test_what_is_no_scaler(source: Any) -> None:
    with pytest.raises(StateError, match="cannot read a loss scaler from"):
        import_scaler(source)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: import_scaler({}), "it is empty, as the state of a disabled scaler is"),
        (lambda: import_scaler(TORCH, "tourch"), "unknown system 'tourch'; did you mean 'torch'"),
        (lambda: import_scaler(TORCH, "flax"), "no state or configuration of flax.*fin_steps"),
        (lambda: import_scaler(TORCH, "polyamp"), "no loss scaler|polyamp"),
        (lambda: import_scaler(TORCH, rule={"intervall": 3}), "no configuration of torch"),
        (
            lambda: import_scaler(MEGATRON, rule={**MEGATRON_CONFIG, "hysteresis": "2"}),
            "megatron: Dynamic: hysteresis must be an integer",
        ),
        (
            lambda: import_scaler(MEGATRON, rule={"hysteresis": 2, "loss_scale_windows": 3}),
            "no parameter 'loss_scale_windows'; did you mean 'loss_scale_window'",
        ),
        (lambda: import_scaler(TORCH, rule="torch"), "rule must be a rule or a configuration"),
        (lambda: export_scaler(Dynamic(), Dynamic().init(), "tf"), "unknown system 'tf'"),
        (
            lambda: export_scaler(Dynamic(), Dynamic().init(), "torch", part="all"),
            "part must be 'state' or 'config'",
        ),
    ],
    ids=range(10),
)
def test_wrong_calls(call: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        call()


def test_a_collapsed_scale_is_lifted_once() -> None:
    with pytest.warns(UserWarning, match="lifted") as caught:
        state = import_scaler({**TORCH, "scale": 0.0})[1]
    assert (state.loss_scale, len(caught)) == (2.0**-126, 1)


def test_nothing_that_was_read_is_changed() -> None:
    data = {"optimizer": {"grad_scaler": dict(MEGATRON)}, "args": dict(MEGATRON_CONFIG)}
    before = copy.deepcopy(data)
    import_scaler(data)
    assert data == before


@pytest.mark.parametrize(
    ("saved", "system", "missing"),
    [
        ({"scale": 4.0, "growth_factor": 2.0, "growth_interval": 3}, "torch", "_growth_tracker"),
        ({"dynamic_scale": 4.0, "dynamic_growth_steps": 5}, None, "step_counter"),
        ({"cur_scale": 8.0, "cur_iter": 50, "scale_window": 10}, "deepspeed-zero", "dynamic"),
        ({"cur_scale": 8.0, "cur_iter": 50, "scale_window": 10}, "deepspeed-stage0", "dynamic"),
        ({"scale": 4.0, "growth_tracker": 1, "min_loss_scale": 2.0}, "megatron", "hysteresis"),
        ({"scale": 4.0, "growth_interval": 3}, "nemo", "_growth_tracker"),
        ({"scale": 4.0, "growth_step": 3, "growth_interval": 5}, "colossalai", "hysteresis"),
        ({"_growth_tracker": 1, "growth_interval": 3}, "torch", "scale"),
        ({"growth_tracker": 1, "min_loss_scale": 2.0}, "megatron", "hysteresis_tracker, scale"),
        ({"step_counter": 1, "dynamic_growth_steps": 5}, None, "dynamic_scale"),
        ({"fin_steps": 1, "growth_interval": 5}, "flax", "scale"),
        ({"counter": 3, "period": 5}, "jmp", "loss_scale"),
        ({"loss_scale": 16.0, "min_loss_scale": 2.0}, "apex", "unskipped"),
        ({"cur_hysteresis": 1, "delayed_shift": 2}, "deepspeed-zero", "cur_iter, cur_scale"),
        (
            {"initial_loss_scale": 8.0, "optimizer": {"grad_scaler": {"scale": 4.0}}},
            None,
            r"at optimizer\.grad_scaler: it has scale, but not growth_tracker",
        ),
    ],
)
def test_half_a_state_is_not_read_as_a_configuration(saved, system, missing) -> None:
    with pytest.raises(polyamp.StateError, match=f"half a state of .*{missing}"):
        polyamp.import_scaler(saved, system)


@pytest.mark.parametrize("missing", ["cur_iter", "last_overflow_iter", "scale_window"])
@pytest.mark.parametrize(("saved", "flag"), [(ZERO, "dynamic"), (STAGE0, "dynamic_loss_scale")])
def test_a_scale_that_changes_has_its_counts(saved, flag: str, missing: str) -> None:
    part = {key: value for key, value in saved.items() if key != missing}
    with pytest.raises(StateError, match=f"missing {missing}; it has"):
        import_scaler(part)
    with pytest.raises(StateError, match=f"{flag} must be true or false, got 3"):
        import_scaler({**saved, flag: 3})
    assert import_scaler({**part, flag: False})[0] == polyamp.Static(64.0)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"dynamic_scale": 4.0}, "half a state: keras without step_counter"),
        ({k: v for k, v in TORCH.items() if k != "_growth_tracker"}, "torch without _growth_tr"),
        ({"x": 1, "scaler": {"scale": 1.0, "growth_tracker": 2}}, "megatron at scaler without"),
    ],
)
def test_the_nearest_system_is_named(saved, words: str) -> None:
    with pytest.raises(StateError, match=f"no loss scaler that is known.*{words}"):
        import_scaler(saved)


def test_a_lone_loss_scale_may_be_jmp_s() -> None:
    with pytest.raises(StateError, match="fairseq at the top; metaseq at the top; jmp, whose"):
        import_scaler({"loss_scale": 1024.0})
    assert import_scaler({"loss_scale": 1024.0}, "jmp")[0] == polyamp.Static(1024.0)
    rule, state = import_scaler({"loss_scale": 1024.0, "factor": 4}, "jmp")
    assert (rule.growth_factor, state.loss_scale) == (4.0, 1024.0)
    words = {"loss_scale": "dynamic", "max_loss_scale": 2.0**17}  # of apex' amp.initialize
    assert import_scaler(words, "apex")[0] == Dynamic.like("apex", max_scale=2.0**17)


def test_a_tracker_above_its_hysteresis() -> None:
    with pytest.raises(StateError, match=r"cur_hysteresis is 9.*above its delayed_shift, 2"):
        import_scaler({**ZERO, "cur_hysteresis": 9})
    saved = {**MEGATRON, "hysteresis_tracker": 9}
    with pytest.warns(UserWarning, match="hysteresis=2: it goes on with 2. Is it the config"):
        assert import_scaler(saved, rule=MEGATRON_CONFIG)[1].left == 2
    for source, left in ((saved, 9), ({**STAGE0, "cur_hysteresis": 3}, 3)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rule, state = import_scaler(source)
        assert (rule.hysteresis, state.left) == (left, left)
        others, tracker = (str(w.message) for w in caught)
        assert f"its default hysteresis, 2: hysteresis={left} is assumed instead" in tracker
        assert "hysteresis=" not in others
