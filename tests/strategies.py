"""Random rules and random runs for the property tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import polyamp

F32_MAX = float(np.finfo(np.float32).max)

factors_up = st.sampled_from([2.0, 2.0, 4.0, 1.5, 1.1, 3.0, 1.001, 1e10])
factors_down = st.sampled_from([0.5, 0.5, 0.25, 0.7, 0.9, 0.1, 1e-3, 0.999])
powers = st.one_of(
    st.integers(-8, 20), st.integers(-126, 127), st.sampled_from([-126, -125, 125, 126, 127])
)
scales = st.one_of(
    powers.map(lambda p: 2.0**p),
    st.builds(
        lambda p, m: float(np.float32(2.0 ** min(p, 126) * m)), powers, st.floats(1.0, 1.999)
    ),
    st.just(F32_MAX),
)
"""Scales anywhere in float32's normal range, the middle and both ends more often."""


@st.composite
def dynamics(draw: Any) -> polyamp.Dynamic:
    """Any `Dynamic` rule: short intervals, so that a run of some dozen steps meets everything."""
    low, init, high = sorted(draw(st.tuples(scales, scales, scales)))
    follows = draw(st.booleans()) and draw(st.booleans())
    return polyamp.Dynamic(
        init_scale=init,
        min_scale=draw(st.sampled_from([low, init, 2.0**-126])),
        max_scale=draw(st.sampled_from([high, high, init, F32_MAX])),
        growth_factor=draw(st.sampled_from([2.0, 3.0, 2.0**20]) if follows else factors_up),
        backoff_factor=draw(factors_down),
        growth_interval=draw(st.integers(1, 6)),
        hysteresis=draw(st.integers(1, 4)),
        hysteresis_refill=draw(st.sampled_from(["growth", "clean"])),
        tolerance=draw(st.sampled_from([0.0, 0.0, 0.05, 0.1, 0.125, 0.25, 0.333, 0.4, 0.5, 1.0])),
        threshold=draw(st.sampled_from([None, None, init, low])),
        late_first_window=not follows and draw(st.booleans()),
        window_follows_scale=follows,
        at_floor=draw(st.sampled_from(["clamp", "hold", "fault"])),
        fault_when=draw(st.sampled_from(["at_floor", "reaching_floor"])),
        max_skips_in_a_row=draw(st.sampled_from([None, None, 1, 2, 3, 7])),
    )


statics = st.builds(
    polyamp.Static, init_scale=scales, max_skips_in_a_row=st.sampled_from([None, 1, 3])
)
rules = st.one_of(dynamics(), dynamics(), dynamics(), statics)

event = st.sampled_from([(True, True)] * 6 + [(False, True)] * 3 + [(True, False), (False, False)])


@st.composite
def runs(draw: Any, most: int = 60) -> list[tuple[bool, bool]]:
    """Events of a run, in bursts: clean stretches long enough to grow, overflows in a row."""
    events: list[tuple[bool, bool]] = []
    for _ in range(draw(st.integers(1, 12))):
        events += [draw(event)] * draw(st.integers(1, 8))
    return events[:most]
