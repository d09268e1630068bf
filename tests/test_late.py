"""A transition made one step late: the level of amax is moved to the scale in force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polyamp import Dynamic, Predictive, Signal, bind
from polyamp._late import late
from polyamp._xp import F32_MAX

STEP = bind(Predictive())
START = Predictive().init()


@given(st.integers(-20, 20), st.integers(-20, 20), st.floats(2.0**-10, 2.0**10, width=32))
def test_the_same_gradients_are_the_same_news_at_any_scale(
    now: int, used: int, true: float
) -> None:
    state = START._replace(loss_scale=2.0**now)
    seen = Signal(True, amax=true * 2.0**used)
    want = STEP(state, Signal(True, amax=true * 2.0**now))
    assert late(STEP, state, seen, 2.0**used) == want


def test_what_is_finite_stays_so_and_flags_count_as_they_came() -> None:
    state = START._replace(loss_scale=2.0**100)
    seen = Signal(True, amax=2.0**60)
    assert late(STEP, state, seen, 1.0) == STEP(state, Signal(True, amax=F32_MAX))
    count = bind(Dynamic())
    state = Dynamic().init()
    for signal in (Signal(True), Signal(False), Signal(True, loss_finite=False)):
        assert late(count, state, signal, 8.0) == count(state, signal)
