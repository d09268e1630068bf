"""The cases that show that a backend scales as the core does; each gives rows.

    golden traces          the transition alone, on sequences recorded from 17 configurations
    random signals         the transition alone, on random ones, for every rule
    training <dtype>       real steps through the public API, overflowing by their data
    unscale exactly        weights bit for bit, at scales from 2**-100 to 2**124
    one NaN                in a gradient of 512 x 512, and of 100,003 entries
    skip leaves no trace   Adam's later weights, with a bad batch and without it
    resume                 saved after every step, loaded, gone on with
    hand-over              ten steps on from what another backend saved

A case runs on one device in every mode of the backend.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from polyamp._dynamic import Dynamic
from polyamp._errors import SkippedStepWarning
from polyamp._interchange import scaler_from_dict, scaler_to_dict
from polyamp._scaling import Rule
from polyamp.testing._golden import golden, golden_rule, overflows, scales
from polyamp.testing._rules import every_rule
from polyamp.testing._traces import (
    Difference,
    expected,
    first_difference,
    from_flags,
    random_signals,
    stacked,
)
from polyamp.testing._training import (
    Training,
    array_batch,
    kinds_for,
    network,
    reference,
    training_difference,
    weights_difference,
)

if TYPE_CHECKING:
    from polyamp._registry import Backend

HALVES = ("float16", "bfloat16")
SEGMENT = 10
"""Steps between two hand-overs."""
TRAINING_STEPS = 24
SHORT = ("dynamic", "auto", "two-phase", "tolerant", "window", "static 512", "deepspeed-zero")
"""Names of rules that differ much, for short runs."""


class Subject(NamedTuple):
    """What is tried: a backend on one of its devices."""

    backend: Backend
    label: str
    """The backend's name for people, such as "keras (jax)"."""
    device: str


class Plan(NamedTuple):
    """How much is tried."""

    steps: int = 1000
    """Of random signals."""
    seed: int = 0
    """Of the random signals."""
    quick: bool = False
    """Golden traces, and resuming after every step, eagerly only; compiled transitions and
    trainings under the rules `SHORT`, in the narrow formats under "dynamic" and "auto"."""
    only: Collection[str] | None = None
    """Names of the rules tried; None: every one."""

    def rules(self, *, few: bool = False) -> dict[str, Rule]:
        """The rules by name; if the plan is quick and `few` do, the short list."""
        names = SHORT if few and self.quick else self.only
        return {n: r for n, r in every_rule().items() if names is None or n in names}


class Row(NamedTuple):
    """What one case found."""

    check: str
    backend: str
    device: str
    mode: str
    rule: str
    steps: int
    """Compared."""
    difference: Difference | None = None
    """The first one; None: identical."""
    error: str | None = None
    """What was raised in place of a result."""

    @property
    def ok(self) -> bool:
        """Whether all was identical."""
        return self.difference is None and self.error is None

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        values = self._asdict()
        values["difference"] = self.difference and self.difference._asdict()
        return {**values, "ok": self.ok}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """The row that `to_dict` wrote."""
        values = {name: data[name] for name in cls._fields}
        found = values["difference"]
        return cls(**{**values, "difference": found and Difference(**found)})


Found = tuple[int, Difference | None]
"""Steps compared, and the first difference."""
Case = Callable[[Subject, Plan], Iterator[Row]]


def conformance(subject: Subject, plan: Plan) -> Iterator[Row]:
    """Every case but the hand-over."""
    for case in CASES.values():
        yield from case(subject, plan)


def _row(subject: Subject, check: str, mode: str, rule: str, find: Callable[[], Found]) -> Row:
    where = (check, subject.label, subject.device, mode, rule)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SkippedStepWarning)
            return Row(*where, *find())
    except Exception as error:  # whatever a framework raises is a finding
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(*where, 0, error=told[:500])


def golden_traces(subject: Subject, plan: Plan) -> Iterator[Row]:
    """The transition on the recorded sequences."""
    modes = list(subject.backend.modes("transition"))
    for mode in modes[:1] if plan.quick else modes:
        for name in golden()["configurations"]:
            yield _row(subject, "golden traces", mode, name, partial(_golden, subject, name, mode))


def _golden(subject: Subject, name: str, mode: str) -> Found:
    rule = golden_rule(name)
    sequences = overflows()
    longest = max(map(len, sequences.values()))
    signals = [from_flags(bad, rule).padded(longest) for bad in sequences.values()]
    found = subject.backend.replay(rule, signals, mode, subject.device)
    for (sequence, bad), given, got in zip(sequences.items(), signals, found, strict=True):
        want = expected(rule, given)
        recorded, restated = golden()["traces"][name][sequence], scales(want[: len(bad)])
        if restated != recorded:
            return 0, Difference(1, f"scales of {sequence}", str(recorded), str(restated))
        different = first_difference(got, want)
        if different:
            return different.step - 1, different._replace(field=f"{different.field} of {sequence}")
    return sum(map(len, sequences.values())), None


def random_traces(subject: Subject, plan: Plan) -> Iterator[Row]:
    """The transition on random signals."""
    for mode in subject.backend.modes("transition"):
        for name, rule in plan.rules(few=mode != "eager").items():

            def find(rule: Rule = rule, mode: str = mode) -> Found:
                signals = random_signals(rule, plan.seed, plan.steps)
                (got,) = subject.backend.replay(rule, [signals], mode, subject.device)
                return _compared(first_difference(got, expected(rule, signals)), plan.steps)

            yield _row(subject, "random signals", mode, name, find)


def _compared(difference: Difference | None, steps: int) -> Found:
    return (difference.step - 1 if difference else steps), difference


def trainings(subject: Subject, plan: Plan) -> Iterator[Row]:
    """Real steps under every rule, in float32 with momentum and in the narrow formats."""
    for mode in subject.backend.modes("training"):
        for dtype in ("float32", *HALVES):
            rules = plan.rules(few=True)
            if plan.quick and dtype in HALVES:
                rules = {name: rules[name] for name in ("dynamic", "auto")}
            for name, rule in rules.items():
                kinds = kinds_for(rule, TRAINING_STEPS)
                optimizer = "momentum" if dtype == "float32" else "sgd"
                training = network(rule, kinds, dtype=dtype, optimizer=optimizer)
                yield _trained(subject, f"training {dtype}", mode, name, training)


def _trained(subject: Subject, check: str, mode: str, rule: str, training: Training) -> Row:
    training = training._replace(mode=mode, device=subject.device)

    def find() -> Found:
        rows = subject.backend.toy_train(training)
        return _compared(training_difference(rows, training), len(rows))

    return _row(subject, check, mode, rule, find)


def exact_unscaling(subject: Subject, plan: Plan) -> Iterator[Row]:
    """Gradients of full precision, scaled by 2**-100 to 2**124, come back bit for bit."""
    import numpy as np

    dice = np.random.default_rng(plan.seed)
    rule = Dynamic(init_scale=2.0**-100, growth_factor=2.0**16, growth_interval=1)
    targets = dice.uniform(0.5, 2, (15, 64)).astype(np.float32)
    training = Training(rule, [np.zeros(64, np.float32)], [array_batch(t) for t in targets])
    for mode in _array_modes(subject):
        yield _trained(subject, "unscale exactly", mode, "powers of two", training)


def _array_modes(subject: Subject) -> list[str]:
    """Those in which one array can be trained: a memory format needs a network."""
    return [mode for mode in subject.backend.modes("training") if mode != "channels_last"]


def one_nan(subject: Subject, plan: Plan) -> Iterator[Row]:
    """A gradient with one NaN, first, in the middle and last, is seen; the others are applied."""
    import numpy as np

    for shape in ((512, 512), (100_003,)):
        ones = np.ones(shape, np.float32)
        places = [None, 0, ones.size // 2 + 1, None, ones.size - 1, None]
        batches = [array_batch(ones, place) for place in places]
        training = Training(Dynamic(init_scale=2.0**10), [ones], batches, learning_rate=0.125)
        what = " x ".join(map(str, shape))
        for mode in _array_modes(subject):
            yield _trained(subject, "one NaN", mode, f"gradient of {what}", training)


def untouched_by_skips(subject: Subject, plan: Plan) -> Iterator[Row]:
    """Adam's weights after bad batches are those of a run that never saw them."""
    rule = Dynamic(init_scale=2.0**10, growth_interval=3)
    kinds = ["clean", "overflow", "clean", "lost", "overflow", "clean", "clean"]
    whole = network(rule, kinds, optimizer="adam", learning_rate=2.0**-6)
    kept = [b for b, kind in zip(whole.batches, kinds, strict=True) if kind == "clean"]

    def find(mode: str) -> Found:
        train = subject.backend.toy_train
        here = whole._replace(mode=mode, device=subject.device)
        with_them, without = train(here), train(here._replace(batches=kept))
        clean = [n for n, kind in enumerate(kinds) if kind == "clean"]
        for (right, _), number in zip(without, clean, strict=True):
            different = weights_difference(with_them[number][0], right, number + 1)
            if different:
                return number, different
        return _compared(training_difference(with_them, whole), len(kinds))

    for mode in subject.backend.modes("training"):
        yield _row(subject, "skip leaves no trace", mode, "adam", partial(find, mode))


def resumed(subject: Subject, plan: Plan) -> Iterator[Row]:
    """A run saved after any number of steps and loaded goes on as if nothing had been."""
    rule = Dynamic(init_scale=64.0, growth_interval=2, hysteresis=2)
    kinds = ["clean", "overflow", "clean", "clean", "overflow", "overflow", "clean", "clean"]
    whole = network(rule, kinds)

    def find(mode: str) -> Found:
        here = whole._replace(mode=mode, device=subject.device)
        rows = subject.backend.toy_train(here)
        every = mode == "eager" or not plan.quick
        prefixes = range(1, len(kinds)) if every else (3,)
        for saved in prefixes:
            weights, state = rows[saved - 1]
            text = json.dumps(scaler_to_dict(here.rule, state))
            loaded, state = scaler_from_dict(json.loads(text))
            rest = here._replace(rule=loaded, weights=weights, state=state)
            rest = rest._replace(batches=here.batches[saved:])
            later = subject.backend.toy_train(rest)
            want = [row[1] for row in rows[saved:]]
            different = first_difference(stacked([row[1] for row in later]), want)
            different = different or weights_difference(later[-1][0], rows[-1][0], len(later))
            if different:
                return saved, different._replace(field=f"{different.field} resumed after {saved}")
        return sum(len(kinds) - saved for saved in prefixes), None

    for mode in subject.backend.modes("training"):
        yield _row(subject, "resume", mode, "dynamic", partial(find, mode))


CASES: dict[str, Case] = {
    "golden traces": golden_traces,
    "random signals": random_traces,
    "trainings": trainings,
    "unscale exactly": exact_unscaling,
    "one NaN": one_nan,
    "skip leaves no trace": untouched_by_skips,
    "resume": resumed,
}


class HandOver(NamedTuple):
    """What one backend gives the next of a training, for each rule."""

    steps: int
    """Made so far."""
    saved: dict[str, Any]
    """By rule: {"scaler": the portable dict, "weights": nested lists}."""


def take_over(subject: Subject, plan: Plan, given: HandOver) -> tuple[list[Row], HandOver]:
    """Go on for ten steps from what another backend saved.

    Returns:
        One row a rule, compared with a training that was never handed over, and what is saved now.
    """
    rows, saved = [], {}
    for name, rule in plan.rules(few=True).items():

        def find(name: str = name, rule: Rule = rule) -> Found:
            found, saved[name] = _segment(subject, rule, given.steps, given.saved.get(name))
            return found

        mode = next(iter(subject.backend.modes("training")))
        rows.append(_row(subject, "hand-over", mode, name, find))
    return rows, HandOver(given.steps + SEGMENT, saved)


def _segment(subject: Subject, rule: Rule, start: int, given: Any) -> tuple[Found, Any]:
    import numpy as np

    end = start + SEGMENT
    kinds = ["clean" if kind == "clean" else "overflow" for kind in kinds_for(rule, end)]
    whole = network(rule, kinds)
    part = whole._replace(batches=whole.batches[start:], device=subject.device)
    if start:
        if given is None:
            raise ValueError("the backend before this one handed nothing over")
        loaded, state = scaler_from_dict(given["scaler"])
        weights = [np.asarray(w, np.float32) for w in given["weights"]]
        part = part._replace(rule=loaded, state=state, weights=weights)
    rows = subject.backend.toy_train(part)
    want = [state for _, state in reference(whole, False)[start:]]
    different = first_difference(stacked([state for _, state in rows]), want)
    different = different or training_difference(rows, part)
    weights, state = rows[-1]
    after = {
        "scaler": scaler_to_dict(rule, state),
        "weights": [np.asarray(w).tolist() for w in weights],
    }
    found = _compared(different and different._replace(step=different.step + start), SEGMENT)
    return found, after
