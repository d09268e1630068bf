#!/usr/bin/env bash
# Everything that needs an accelerator, in one call, from the repository root:
#   bash tests/gpu/run.sh [FOLDER FOR THE REPORTS]
# Uses the Python on PATH with torch installed and this tree on its path; needs no installation.
# Without an accelerator the tests skip and the benchmarks measure the CPU.
set -u
out=${1:-${OUT:-.}}
export PYTHONPATH="$PWD:$PWD/backends${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator")'
python3 -m pytest -q -m gpu tests/gpu -p no:cacheprovider 2>&1 | tee "$out/gpu-tests.txt" || status=1
[ "${PIPESTATUS[0]}" = 0 ] || status=1
python3 -m polyamp.cli bench torch-step --json >"$out/torch-step.json" || status=1
python3 -m polyamp.cli demo --json >"$out/demo.json" || status=1
cat "$out/torch-step.json" "$out/demo.json"
exit $status
