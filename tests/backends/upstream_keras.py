"""Run Keras' own tests of loss scaling and dtype policies on polyamp's classes.

    python tests/backends/upstream_keras.py [TREE] [--framework jax]

TREE is a checkout of keras-team/keras, of the version that is installed or near it; by default the
installed package, which has its tests with it. Each of Keras' backends is tried in a process of its
own. There this file is a pytest plugin: before the tests are imported it puts polyamp's
LossScaleOptimizer, and dtype policies and maps that polyamp made, where they look for Keras'.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

FILES = (
    "src/optimizers/loss_scale_optimizer_test.py",
    "src/dtype_policies/dtype_policy_test.py",
    "src/dtype_policies/dtype_policy_map_test.py",
)
FRAMEWORKS = ("tensorflow", "jax", "torch")
POLICIES = ("float16", "bfloat16", "float32", "float64", "mixed_float16", "mixed_bfloat16")
MADE: dict[str, int] = {}
"""How many objects of each kind polyamp made for the tests."""


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put polyamp's classes into the modules of the tests."""
    for module in {id(item.module): item.module for item in items}.values():
        replace(module)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was replaced, so that a run which replaced nothing shows."""
    terminalreporter.write_line(f"made by polyamp: {MADE}")


def replace(module: ModuleType) -> None:
    """Rebind the names of Keras' classes in a test module."""
    import polyamp.keras as amp

    ours = {
        "LossScaleOptimizer": _counting(amp.LossScaleOptimizer),
        "DTypePolicy": Stand(vars(module).get("DTypePolicy"), _policy),
        "DTypePolicyMap": Stand(vars(module).get("DTypePolicyMap"), _policy_map),
    }
    for name, value in ours.items():
        if name in vars(module):
            setattr(module, name, value)


def _counting(cls: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _count(cls.__name__)
        original(self, *args, **kwargs)

    original, cls.__init__ = cls.__init__, init
    return cls


def _count(kind: str) -> None:
    MADE[kind] = MADE.get(kind, 0) + 1


class Stand:
    """Called, it gives what polyamp makes; its attributes are those of Keras' class."""

    def __init__(self, theirs: Any, make: Any) -> None:
        self.theirs, self.make = theirs, make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(self.theirs, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.theirs)


def _policy(theirs: Any, name: Any = None) -> Any:
    """polyamp's policy of a name that it knows; else Keras' own, with Keras' own error."""
    import polyamp.keras as amp

    if name not in POLICIES:
        return theirs(name)
    _count("DTypePolicy")
    return amp.dtype_policy(name)


def _policy_map(theirs: Any, default_policy: Any = None, policy_map: Any = None) -> Any:
    """polyamp's map of a model without layers; where a test names no default, without one."""
    import keras

    import polyamp.keras as amp

    if policy_map is not None:
        return theirs(default_policy, policy_map)
    _count("DTypePolicyMap")
    default = default_policy or keras.config.dtype_policy().name
    made = amp.dtype_policy_map(default, keras.Layer())
    made.clear()  # the layer itself
    if default_policy is None:
        made._default_policy_arg = None
    return made


def main(arguments: list[str]) -> int:
    """Copy the files, run them on every backend that is installed; 1 if any test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tree", nargs="?", type=Path, help="a checkout of keras-team/keras")
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append")
    options = parser.parse_args(arguments)
    tree = _package(options.tree)
    wanted = options.framework or [f for f in FRAMEWORKS if importlib.util.find_spec(f)]
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            shutil.copy(tree / name, folder)
        return max(_run(framework, Path(folder)) for framework in wanted)


def _package(tree: Path | None) -> Path:
    if tree is not None:
        found = tree / "keras"
    else:
        spec = importlib.util.find_spec("keras")
        if spec is None or spec.origin is None:
            raise SystemExit("keras is not installed")
        found = Path(spec.origin).parent
    missing = [name for name in FILES if not (found / name).is_file()]
    if missing:
        raise SystemExit(f"no tests of Keras in {found}: {', '.join(missing)} missing")
    return found


def _run(framework: str, folder: Path) -> int:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "KERAS_BACKEND": framework}
    env["TF_CPP_MIN_LOG_LEVEL"] = "3"
    print(f"Keras' own tests on {framework}", flush=True)
    command = ["-m", "pytest", "-q", "-p", Path(__file__).stem, "-W", "ignore", str(folder)]
    options = ["--import-mode=importlib", f"--rootdir={folder}", "-c", os.devnull]
    return subprocess.run([sys.executable, "-P", *command, *options], env=env).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
