"""Checks of transitions and of real training steps, in every mode of a backend, on every device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import polyamp
from polyamp.testing import _conformance as cases
from polyamp.testing._checks import INF, NAN, Checks, same
from polyamp.testing._rules import RULES
from polyamp.testing._traces import events, expected, from_flags
from polyamp.testing._training import Training, array_batch

PLAN = cases.Plan(
    steps=300, quick=True, only=(*cases.SHORT, "odd factors", "faulting", "logmax", "delayed")
)


class RunChecks(Checks):
    """Traces against the core's, and what a training step owes its weights."""

    # Whole traces, compared bit for bit

    def test_golden_traces(self) -> None:
        self._all_identical(cases.golden_traces)

    def test_random_signals(self) -> None:
        self._all_identical(cases.random_traces)

    def test_trainings_that_overflow_by_their_data(self) -> None:
        self._all_identical(cases.trainings)

    def test_unscaling_is_exact_in_training(self) -> None:
        self._all_identical(cases.exact_unscaling)

    def test_one_nan_in_a_large_gradient_is_seen_in_training(self) -> None:
        self._all_identical(cases.one_nan)

    def test_skips_leave_no_trace_in_the_moments(self) -> None:
        self._all_identical(cases.untouched_by_skips)

    def test_training_resumes_after_any_step(self) -> None:
        self._all_identical(cases.resumed)

    def test_training_is_handed_over(self) -> None:
        for subject in self._subjects():
            given = cases.HandOver(0, {})
            for _ in range(3):
                rows, given = cases.take_over(subject, PLAN, given)
                _refuse(rows)

    def test_compiled_transitions_equal_the_host(self) -> None:
        flags = events(seed=0, steps=60)
        for rule in RULES:
            step = self.backend.compiled(polyamp.bind(rule, self.backend.xp))
            state, signals = rule.init(self.backend.xp), from_flags([not f for f in flags], rule)
            for good, want in zip(flags, expected(rule, signals), strict=True):
                state = step(state, polyamp.Signal(self._flag(good)))
                self._is(state.loss_scale, want.loss_scale, "f32")
                counts = [*zip(state[1:-1], want[1:-1], strict=True)]
                for got, right in [*counts, *zip(state.memory, want.memory, strict=True)]:
                    self._is(got, right, "i32")

    # One weight, whose gradient is the batch

    def test_training_unscales_with_the_scale_that_was_used(self) -> None:
        rule = polyamp.Dynamic(init_scale=1024.0, growth_interval=2)
        rows = self._train(rule, [0.5, 0.5, 0.5])
        same([w.tolist() for w, _ in rows], [[0.5, 1.5], [0.0, 1.0], [-0.5, 0.5]], "weights")
        same([s.loss_scale for _, s in rows], [1024.0, 2048.0, 2048.0], "scales")

    def test_training_gives_the_update_of_training_without_scaling(self) -> None:
        batches = [0.1, 0.7, -0.3, 1e-3]
        plain = self._train(polyamp.Static(1.0), batches)
        scaled = self._train(polyamp.Dynamic(growth_interval=2), batches)
        for (want, _), (got, _) in zip(plain, scaled, strict=True):
            same(got.tobytes(), want.tobytes(), "weights with and without scaling")

    def test_training_skips_as_if_the_batch_had_never_been_seen(self) -> None:
        rule = polyamp.Dynamic(growth_interval=2)
        for bad in (INF, NAN, 1e35):
            with_it = self._train(rule, [0.5, bad, 0.25])
            without = self._train(rule, [0.5, 0.25])
            same(with_it[1][0].tobytes(), with_it[0][0].tobytes(), f"weights after {bad}")
            same(with_it[2][0].tobytes(), without[1][0].tobytes(), f"weights later than {bad}")
            same(with_it[1][1][3:6], (2, 1, 1), f"step, skipped, in a row after {bad}")

    def test_training_survives_any_number_of_overflows(self) -> None:
        import numpy as np

        rows = self._train(polyamp.Dynamic(), [INF] * 400 + [0.5])
        weights, state = rows[-1]
        same(rows[-2][0].tolist(), [1.0, 2.0], "weights after 400 overflows")
        same(bool(np.isfinite(weights).all()), True, "weights finite after one more, clean, step")
        same(state.loss_scale, 2.0**-126, "the scale then")

    def test_training_decides_as_the_host(self) -> None:
        for rule in (RULES[0], RULES[1], RULES[4]):
            flags, state = events(seed=3, steps=40), rule.init()
            rows = self._train(rule, [0.5 if good else INF for good in flags])
            for good, (_, found) in zip(flags, rows, strict=True):
                state = polyamp.transition(rule, state, polyamp.Signal(good))
                lost = polyamp.Reason.LOSS_NOT_FINITE
                reasons = {state.reason} if good else {state.reason, lost}
                same(found.reason in reasons, True, f"reason {found.reason} among {reasons}")
                same(found._replace(reason=0), state._replace(reason=0), f"state under {rule}")

    def test_training_goes_on_from_a_saved_state(self) -> None:
        rule = polyamp.Dynamic(init_scale=64.0, growth_interval=2, hysteresis=2)
        batches = [0.5, INF, 0.25, 0.125, INF, INF, 0.5, 0.25]
        whole = self._train(rule, batches)
        for k in range(1, len(batches)):
            weights, state = whole[k - 1]
            text = json.dumps(polyamp.state_to_dict(state))
            loaded = polyamp.state_from_dict(json.loads(text), rule)
            later = self._train(rule, batches[k:], weights, loaded)
            for (w, s), (w2, s2) in zip(whole[k:], later, strict=True):
                same((w2.tobytes(), s2), (w.tobytes(), s), f"continued after {k} steps")

    # Helpers

    def _subjects(self) -> Iterator[cases.Subject]:
        for device in self.backend.devices():
            yield cases.Subject(self.backend, self.backend.NAME, device)

    def _all_identical(self, case: cases.Case) -> None:
        for subject in self._subjects():
            rows = list(case(subject, PLAN))
            same(bool(rows), True, "whether anything was compared")
            _refuse(rows)

    def _train(
        self,
        rule: polyamp.Rule,
        batches: Sequence[float],
        weights: Any = None,
        state: polyamp.ScalerState | None = None,
    ) -> list[tuple[Any, polyamp.ScalerState]]:
        """Weights [1, 2] trained on batches of one value; (weights, state) after each step."""
        import numpy as np

        weights = np.array([1.0, 2.0], np.float32) if weights is None else weights
        before, device = weights.copy(), next(iter(self.backend.devices()))
        data = [array_batch(np.full(2, value)) for value in batches]
        rows = self.backend.toy_train(Training(rule, [weights], data, state, device=device))
        same(weights.tobytes(), before.tobytes(), "the weights passed to toy_train, afterwards")
        return [(np.asarray(after), state) for (after,), state in rows]


def _refuse(rows: Sequence[cases.Row]) -> None:
    """Raise AssertionError with the first rows that are not identical to the core's."""
    wrong = [
        f"{r.check}, {r.backend} on {r.device}, {r.mode}, {r.rule}: {r.difference or r.error}"
        for r in rows
        if not r.ok
    ]
    if wrong:
        raise AssertionError("\n".join([f"{len(wrong)} of {len(rows)} differ:", *wrong[:5]]))
