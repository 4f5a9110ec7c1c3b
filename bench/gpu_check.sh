#!/bin/sh
# Checks and figures of the worker on one GPU, in one run of at most ten minutes.
#
#   bench/gpu_check.sh            on a machine with a GPU, torch and triton
#   bench/gpu_check.sh --dry      the same steps in Triton's interpreter, tiny shapes; proves that the script runs
#
# Python packages that the machine lacks are taken from .whl/ (no network is used). Results go to $OUT, by default
# bench/results/gpu; each step's log and JSON beside the summary. Prints one table last.
# PYTHON names the interpreter to use.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-bench/results/gpu}
dry=""
[ "${1:-}" = "--dry" ] && dry="--dry"
mkdir -p "$out"

if [ -d .whl ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target .whl/site .whl/*.whl >"$out/wheels.log" 2>&1 ||
        echo "wheels: not installed, see $out/wheels.log"
    PYTHONPATH="$PWD/.whl/site${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH
fi

failed=""
step() { # name, seconds, command: run it, keep its log, remember a failure, go on
    name=$1 limit=$2
    shift 2
    begin=$(date +%s)
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    [ $status -eq 0 ] || failed="$failed $name($status)"
    echo "$name: exit $status, $(($(date +%s) - begin)) s"
}

[ -n "$dry" ] || { command -v nvidia-smi >/dev/null && nvidia-smi >"$out/nvidia-smi.log" 2>&1; }
# The machine code of the usual shapes, as this machine's Triton makes it: spills, shared memory, matrix instructions.
step compile 150 "$python" -m bench.compile_kernels --quick --capabilities 90 --json "$out/compile.json"
if [ -n "$dry" ]; then
    TRITON_INTERPRET=1
    export TRITON_INTERPRET
fi
step kernels 300 "$python" -W ignore -m bench.gpu_kernels $dry --seconds 240 --json "$out/kernels.json"

echo
sed '$d' "$out/kernels.log"
[ -z "$failed" ] && echo "all steps passed" || echo "failed:$failed; logs in $out"
[ -z "$failed" ]
