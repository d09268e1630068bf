"""`polyamp bench`: measure polyamp beside what it replaces, and hold it to its limits.

A bench is a function `(quick, tell, **options) -> Report`; `BENCHES` says where it is and which
options it takes. Exit status 1 where a limit is missed.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from polyamp._errors import BackendError, PolyampError, closest
from polyamp._presets import resolve_rule

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from polyamp.bench.report import Report

__all__ = ["BENCHES", "Bench", "add_arguments", "run"]


class Bench(NamedTuple):
    """Where a bench is and what it measures.

    Attributes:
        module, function: of `function(quick: bool, tell: Tell, **options) -> Report`.
        text: what it measures, in a few words.
        needs: the framework it runs in, which is also the extra that installs it; None for none.
        takes: the options of the command line, such as "rule", that it takes as keywords.
    """

    module: str
    function: str
    text: str
    needs: str | None = None
    takes: tuple[str, ...] = ()

    def load(self) -> Callable[..., Report]:
        """The function; imports the framework.

        Raises:
            BackendError: the framework is not installed.
        """
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if self.needs is None or (error.name or "").partition(".")[0] != self.needs:
                raise
            raise BackendError(
                f"this bench needs {self.needs}, which is not installed: pip install"
                f' "polyamp[{self.needs}]"'
            ) from error
        function: Callable[..., Report] = getattr(module, self.function)
        return function


BENCHES: dict[str, Bench] = {
    "core": Bench("polyamp.bench.core", "core", "time of the import and of one transition"),
    "scalers": Bench(
        "polyamp.bench.scalers",
        "scalers",
        "what every scaling rule loses, over recorded and made-up gradients",
        takes=("trace",),
    ),
    "torch-step": Bench(
        "polyamp_torch._bench",
        "torch_step",
        "scale + step + update beside torch.amp.GradScaler, and host syncs",
        needs="torch",
        takes=("rule",),
    ),
    "torch-policy": Bench(
        "polyamp_torch._bench_policy",
        "torch_policy",
        "apply_policy and Trainer beside the same written by hand",
        needs="torch",
    ),
    "torch-clip": Bench(
        "polyamp_torch._bench_clip",
        "torch_clip",
        "clip_and_step + update beside torch's four calls, and beside no scaler",
        needs="torch",
    ),
    "closed-loop": Bench(
        "polyamp_torch._bench_closed",
        "closed_loop",
        "final losses of float16 trainings with a tiny loss, under every scaling rule",
        needs="torch",
    ),
    "selector": Bench(
        "polyamp_torch._bench_selector",
        "selector",
        "what the precision selector chooses, and what comes of it in six hard trainings",
        needs="torch",
    ),
    "torch-selector": Bench(
        "polyamp_torch._bench_adaptive",
        "torch_selector",
        "a training step under Adaptive beside the same without",
        needs="torch",
    ),
    "jax-step": Bench(
        "polyamp_jax._bench",
        "jax_step",
        "a training step with loss scaling beside flax's and jmp's, over the plain one",
        needs="jax",
        takes=("rule",),
    ),
    "jax-selector": Bench(
        "polyamp_jax._bench_selector",
        "jax_selector",
        "a training with statistics every 50 steps beside the same without",
        needs="jax",
    ),
    "tensorflow-step": Bench(
        "polyamp_tensorflow._bench",
        "tensorflow_step",
        "a GradientTape step with LossScaler beside the same without scaling",
        needs="tensorflow",
    ),
    "keras-step": Bench(
        "polyamp_keras._bench",
        "keras_step",
        "fit with LossScaleOptimizer beside Keras' own, over the same without scaling",
        needs="keras",
    ),
    "keras-selector": Bench(
        "polyamp_keras._bench_selector",
        "keras_selector",
        "fit with statistics every 50 steps beside the same without",
        needs="keras",
    ),
}
"""Every bench by its name on the command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `polyamp bench` to `parser`."""
    known = "; ".join(f"{name}: {bench.text}" for name, bench in BENCHES.items())
    parser.add_argument("name", metavar="NAME", help=known)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, wider intervals")
    parser.add_argument(
        "--rule",
        metavar="NAME",
        help="torch-step, jax-step: measure this rule (auto, megatron, ...) instead",
    )
    parser.add_argument(
        "--trace",
        nargs="+",
        metavar="FILE",
        help="scalers: traces, or folders of .npz, in the place of the ones that come with polyamp",
    )


def run(args: argparse.Namespace) -> int:
    """Run the bench that `args` of `add_arguments` names; 0 if every limit is kept, else 1.

    With --json stdout carries the object alone; progress goes to stderr.

    Raises:
        PolyampError: there is no such bench, or it does not take an option that was given.
        RuleError: there is no such rule.
        BackendError: the framework it needs is not installed, or a measuring process failed.
    """
    bench = _named(args.name)
    report = bench.load()(args.quick, _tell, **_options(args, bench))
    if args.json:
        print(report.to_json())
    else:
        report.show()
    return 0 if report.ok else 1


def _options(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    given = {name: getattr(args, name, None) for name in ("rule", "trace")}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in bench.takes:
            able = ", ".join(known for known, other in BENCHES.items() if name in other.takes)
            raise PolyampError(f"bench {args.name} takes no --{name}; {able} do")
    if "rule" in given:
        resolve_rule(given["rule"])
    return given


def _named(name: str) -> Bench:
    if name not in BENCHES:
        near = closest(name, BENCHES)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PolyampError(f"no bench {name!r}: choose from {', '.join(BENCHES)}{hint}")
    return BENCHES[name]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
