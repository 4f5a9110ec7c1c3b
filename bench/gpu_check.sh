#!/bin/sh
# Checks and figures of the worker on one GPU, in one run of at most ten minutes.
#
#   bench/gpu_check.sh            on a machine with a GPU, torch and triton
#   bench/gpu_check.sh --dry      the same steps in Triton's interpreter, tiny shapes; proves that the script runs
#   bench/gpu_check.sh --needs    what a machine needs, and the command that fetches the rest as wheels into .whl/
#
# Python packages that the machine lacks are taken from .whl/ (no network is used). Results go to $OUT, by default
# bench/results/gpu; each step's log and JSON beside the summary. Prints one table last.
# PYTHON names the interpreter to use.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-bench/results/gpu}
dry=""
# What a machine with torch, triton, transformers, uvloop, safetensors, tokenizers and prometheus-client lacks.
wheels="'pyzmq<28' 'msgspec<0.24' 'llguidance>=1.7,<2' starlette uvicorn httptools jinja2 anyio idna h11 click markupsafe"
if [ "${1:-}" = "--needs" ]; then
    cat <<END
On the GPU machine: Linux, an NVIDIA driver, Python 3.12 with torch >= 2.9 (a CUDA build), triton >= 3.6, numpy,
safetensors, tokenizers, transformers, uvloop, prometheus-client, huggingface-hub, tqdm.
The rest travels with the tree as wheels for that Python, about 5 MB; fetch them here with
    python -m pip download --only-binary :all: --no-deps --python-version 3.12 --implementation cp \\
        --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \\
        -d .whl $wheels
END
    exit 0
fi
[ "${1:-}" = "--dry" ] && dry="--dry"
mkdir -p "$out"

if [ -d .whl ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target .whl/site .whl/*.whl >"$out/wheels.log" 2>&1 ||
        echo "wheels: not installed, see $out/wheels.log"
    PYTHONPATH="$PWD/.whl/site${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH
fi
missing=$("$python" - torch triton numpy safetensors tokenizers zmq msgspec llguidance <<'END'
import importlib.util
import sys
print(" ".join(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
END
)
if [ -n "$missing" ]; then
    echo "$python lacks: $missing; see bench/gpu_check.sh --needs"
    exit 2
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
step compile "150" "$python" -m bench.compile_kernels --quick --capabilities 90 --json "$out/compile.json"
if [ -n "$dry" ]; then
    TRITON_INTERPRET=1
    export TRITON_INTERPRET
fi
step kernels 240 "$python" -W ignore -m bench.gpu_kernels $dry --seconds 100 --json "$out/kernels.json"
step engine 240 "$python" -W ignore -m bench.gpu_engine $dry --seconds 150 --json "$out/engine.json"
step transformers "$([ -n "$dry" ] && echo 400 || echo 120)" "$python" -W ignore -m bench.gpu_transformers $dry --against "$out/engine.json" \
    --json "$out/transformers.json"
# Recompute, swap and auto through the three processes, cache on and off: total time and p99 TPOT.
if [ -n "$dry" ]; then
    # The interpreter is no place for a thousand steps: here the reference backend shows that the step runs.
    TRITON_INTERPRET=0 step preemption 400 "$python" -W ignore -m bench.preemption --model tiny --device cpu \
        --attention-backend cpu --workload little --repeat 1 --scale 0.1 --no-modelled
else
    step preemption 120 "$python" -W ignore -m bench.preemption --model qwen3-0.6b --device cuda --repeat 1 \
        --no-modelled
fi

echo
for name in compile kernels engine transformers preemption; do
    echo "== $name"
    case $name in
    compile) tail -n 2 "$out/$name.log" | head -n 1 ;;
    *) sed '$d' "$out/$name.log" ;;
    esac
done
[ -z "$failed" ] && echo "all steps passed" || echo "failed:$failed; logs in $out"
[ -z "$failed" ]
