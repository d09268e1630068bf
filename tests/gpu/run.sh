#!/usr/bin/env bash
# Everything that needs an accelerator, in one call, from the repository root:
#   bash tests/gpu/run.sh [FOLDER FOR THE REPORTS]
# Needs python3 with torch, and from the extras demo and test: rich, scikit-learn, pytest, hypothesis.
# polyamp itself need not be installed: this tree goes on the path, its entry points with it.
# Without an accelerator the tests skip and the benchmarks measure the CPU.
set -uo pipefail
out=${1:-.}
entry=$(mktemp -d)
trap 'rm -rf "$entry"' EXIT
mkdir "$entry/polyamp-0.dist-info"
printf 'Metadata-Version: 2.1\nName: polyamp\nVersion: 0\n' >"$entry/polyamp-0.dist-info/METADATA"
python3 - >"$entry/polyamp-0.dist-info/entry_points.txt" <<'PY'
import tomllib

points = tomllib.load(open("pyproject.toml", "rb"))["project"]["entry-points"]["polyamp.backends"]
print("[polyamp.backends]", *(f"{name} = {module}" for name, module in points.items()), sep="\n")
PY
export PYTHONPATH="$PWD:$PWD/backends:$entry${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator")'
# pytest-xdist, which the other tests run under, need not be there.
python3 -m pytest -q -m gpu -p no:cacheprovider -o addopts="--import-mode=importlib --strict-markers -ra" tests 2>&1 | tee "$out/gpu-tests.txt" || status=1
for bench in torch-step torch-clip torch-policy torch-selector jax-step; do
    python3 -m polyamp.cli bench "$bench" --json | tee "$out/$bench.json" || status=1
done
python3 -m polyamp.cli bench torch-step --rule auto --json | tee "$out/torch-step-auto.json" || status=1
# torch and jax, and keras on them, as far as they are installed.
python3 -m polyamp.cli verify --json | tee "$out/verify.json" || status=1
python3 -m polyamp.cli demo --json | tee "$out/demo.json" || status=1
exit $status
