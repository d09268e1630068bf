"""Generated traces: overflows by chance or by pattern, and gradients whose level moves.

    overflows:p=0.01,steps=10000,seed=0
    bursts:length=5,every=500,steps=10000
    pattern:flags=0001,steps=1000                    repeated
    stationary:level=0,noise=0.5,width=2,steps=6000,seed=0
    drift:bits=-20,...                               moves by so many bits from first to last step
    heavy:dof=2,...                                  Student's t in the place of the normal noise
    shifts:bits=-14/20/-27,every=1500,...            steps up and down

level, noise and bits are log2 of the largest gradient. In the others |g| is spread as
2**(width z1) |z2| with z1, z2 standard normal, 2**(2 width + 2) below the largest at z1 = 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from polyamp._errors import PolyampError, closest
from polyamp.simulate.expressions import parse_expression, read_value
from polyamp.simulate.trace import OverflowTrace, RangeTrace, Trace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_LOW = -120
_LIMITS: dict[str, tuple[float, float]] = {
    "steps": (1, 10**6),
    "seed": (0, 2**63 - 1),
    "p": (0.0, 1.0),
    "length": (1, 10**6),
    "every": (1, 10**6),
    "level": (-100, 100),
    "noise": (0.0, 20.0),
    "width": (0.0, 10.0),
    "dof": (1.0, 1e6),
    "drift": (-200, 200),
}


def generate(text: str) -> Trace:
    """The trace that an expression such as "drift:bits=-20,steps=2000" describes.

    Raises:
        PolyampError: an unknown kind or parameter, or a value that is not allowed.
    """
    kind, first, given = parse_expression(text)[1:]
    if kind not in KINDS:
        near = closest(kind, KINDS)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PolyampError(f"no kind of trace {kind!r}: choose from {', '.join(KINDS)}{hint}")
    function = KINDS[kind]
    defaults = {k: p.default for k, p in list(inspect.signature(function).parameters.items())[1:]}
    if first is not None:
        raise PolyampError(f"{text!r}: {first!r} has no key; {kind} has {', '.join(defaults)}")
    for key in given:
        if key not in defaults:
            raise PolyampError(f"{text!r}: {kind} has no {key!r}; it has {', '.join(defaults)}")
    values = {key: _checked(text, key, given[key], defaults[key]) for key in given}
    trace: Trace = function(text, **values)
    return trace


def _checked(text: str, key: str, given: str, default: Any) -> Any:
    if isinstance(default, str):
        return given
    value = read_value(given)
    low, high = _LIMITS["drift" if key == "bits" else key]
    whole = isinstance(default, int)
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        what = "a whole number" if whole else "a number"
        raise PolyampError(f"{text!r}: {key} must be {what} from {low:g} to {high:g}, got {given}")
    return value


def overflows(name: str, p: float = 0.01, steps: int = 10_000, seed: int = 0) -> OverflowTrace:
    """Each step overflows with probability `p`."""
    import numpy as np

    return OverflowTrace(name, np.random.default_rng(seed).random(steps) < p)


def bursts(name: str, length: int = 5, every: int = 500, steps: int = 10_000) -> OverflowTrace:
    """The last `length` of `every` steps overflow."""
    import numpy as np

    return OverflowTrace(name, np.arange(steps) % every >= every - length)


def pattern(name: str, flags: str = "0001", steps: int = 1000) -> OverflowTrace:
    """`flags`, 1 for an overflow, again and again."""
    import numpy as np

    if set(flags) - {"0", "1"}:
        raise PolyampError(f"{name!r}: flags must be made of 0 and 1, got {flags}")
    return OverflowTrace(name, np.resize(np.array([c == "1" for c in flags]), steps))


def stationary(
    name: str, level: float = 0.0, noise: float = 0.5, width: float = 2.0, steps: int = 6000,
    seed: int = 0,
) -> RangeTrace:  # fmt: skip
    """The level stays."""
    return drift(name, 0.0, level, noise, width, steps, seed)


def drift(
    name: str, bits: float = -20.0, level: float = 0.0, noise: float = 0.5, width: float = 2.0,
    steps: int = 6000, seed: int = 0,
) -> RangeTrace:  # fmt: skip
    """The level moves evenly by `bits`."""
    import numpy as np

    normal = np.random.default_rng(seed).standard_normal(steps)
    return _trace(name, level + np.linspace(0.0, bits, steps) + noise * normal, width)


def heavy(
    name: str, dof: float = 2.0, level: float = 0.0, noise: float = 0.5, width: float = 2.0,
    steps: int = 6000, seed: int = 0,
) -> RangeTrace:  # fmt: skip
    """The level stays, with outliers: noise times Student's t, at most 40 bits either way."""
    import numpy as np

    student = np.random.default_rng(seed).standard_t(dof, steps)
    return _trace(name, level + np.clip(noise * student, -40.0, 40.0), width)


def shifts(
    name: str, bits: str = "-14/20/-27", every: int = 1500, level: float = 0.0, noise: float = 0.5,
    width: float = 2.0, steps: int = 6000, seed: int = 0,
) -> RangeTrace:  # fmt: skip
    """The level moves by each of `bits` in turn, `every` so many steps."""
    moves = []
    for i, part in enumerate(bits.split("/"), 1):
        by = read_value(part)
        if not isinstance(by, int) or isinstance(by, bool) or abs(by) > 200:
            raise PolyampError(
                f"{name!r}: bits must be whole numbers from -200 to 200 such as -14/20, got {part}"
            )
        if i * every < steps:
            moves.append((i * every, by))
    return stationary(name, level, noise, width, steps, seed).shifted(moves)


KINDS: dict[str, Callable[..., Trace]] = {
    "overflows": overflows,
    "bursts": bursts,
    "pattern": pattern,
    "stationary": stationary,
    "drift": drift,
    "heavy": heavy,
    "shifts": shifts,
}
"""Kinds of generated traces by name."""


def _trace(name: str, levels: Floats, width: float) -> RangeTrace:
    import numpy as np

    table = np.array([_spread(width)])
    return RangeTrace(
        name=name,
        amax=np.exp2(levels),
        inner=np.zeros(len(levels)),
        below_params=table,
        below_all=table,
        low=_LOW,
        per_octave=1,
        offset=levels,
    )


def _spread(width: float) -> Sequence[float]:
    """Share of the entries below 2**bits of the largest, bits = -120 .. 0."""
    middle, points = -2 * width - 2, 64
    centres = [
        middle + width * NormalDist().inv_cdf((i + 0.5) / points) for i in range(points)
    ] if width else [middle]  # fmt: skip
    shares = [
        sum(math.erf(2.0 ** (bits - centre) / math.sqrt(2)) for centre in centres) / len(centres)
        for bits in range(_LOW, 0)
    ]
    return [*shares, 1.0]
