#!/bin/sh
# Checks and figures of the worker on one GPU, in one run of at most ten minutes.
#
#   bench/gpu_check.sh            on a machine with a GPU, torch and triton
#   bench/gpu_check.sh --dry      the same steps in Triton's interpreter, tiny shapes; proves that the script runs
#   bench/gpu_check.sh --needs    what a machine needs, and the command that fetches the rest as wheels into .whl/
#
# Python packages that the machine lacks are taken from .whl/ (no network is used). Results go to $OUT, by default
# bench/results/gpu, or build/gpu_dry, which git ignores: a dry run measures nothing. Each step's log and JSON are beside
# the summary. Prints what each step should take, what it took, and one table last. PYTHON names the interpreter to use, LIMIT_S the seconds after which nothing goes on (570).
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-bench/results/gpu}
dry=""
if [ "${1:-}" = "--dry" ]; then
    dry="--dry"
    out=${OUT:-build/gpu_dry}
fi
# What a machine with torch, triton, transformers, uvloop, safetensors, tokenizers and prometheus-client lacks.
wheels="'pyzmq<28' 'msgspec<0.24' 'llguidance>=1.7,<2' starlette uvicorn httptools jinja2 anyio idna h11 click markupsafe typing-extensions"
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
mkdir -p "$out"
rm -f "$out"/*.status
: "${TRITON_CACHE_DIR:=${TMPDIR:-/tmp}/threefold-triton}"
export TRITON_CACHE_DIR

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

limit_s=${LIMIT_S:-$([ -n "$dry" ] && echo 3600 || echo 570)}
begun=$(date +%s)
# Seconds that each step should take on an H200 with 16 cores, and may take. None was measured yet.
plan="warm 35 90
compile 40 90
kernels 75 120
engine 85 140
load 70 90
transformers 80 110
preemption 60 100"
if [ -z "$dry" ]; then
    echo "$plan" | awk '{ if ($1 != "compile") sum += $2; printf "%-13s about %3d s, at most %3d s%s\n", $1, $2, $3,
        $1 == "compile" ? ", beside warm" : "" } END { printf "%-13s about %3d s\n", "all", sum }'
    echo "nothing goes on after $limit_s s"
fi

step() { # name, command: run it, keep its log and status, go on
    name=$1
    shift
    rest=$((limit_s - $(date +%s) + begun))
    limit=$([ -n "$dry" ] && echo 900 || echo "$plan" | awk -v name="$name" '$1 == name { print $3 }')
    [ "$limit" -gt "$rest" ] && limit=$rest
    if [ "$limit" -lt 5 ]; then
        echo "$name: skipped, time is up"
        echo skipped >"$out/$name.status"
        return
    fi
    begin=$(date +%s)
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    echo $status >"$out/$name.status"
    echo "$name: exit $status, $(($(date +%s) - begin)) s"
}

[ -n "$dry" ] || { command -v nvidia-smi >/dev/null && nvidia-smi >"$out/nvidia-smi.log" 2>&1; }
# The machine code of the usual shapes, as this machine's Triton makes it: spills, shared memory, matrix instructions.
# Beside it, on the other cores, what the measurements launch: they should not wait for the compiler.
step compile "$python" -m bench.compile_kernels --quick --capabilities 90 --json "$out/compile.json" &
if [ -n "$dry" ]; then
    wait
    TRITON_INTERPRET=1
    export TRITON_INTERPRET
fi
step warm "$python" -W ignore -m bench.gpu_warm $dry $([ -n "$dry" ] && echo --processes 2)
wait
step kernels "$python" -W ignore -m bench.gpu_kernels $dry --seconds 95 --json "$out/kernels.json"
step engine "$python" -W ignore -m bench.gpu_engine $dry --seconds 110 --json "$out/engine.json"
step load "$python" -W ignore -m bench.gpu_load $dry --seconds 55 --json "$out/load.json"
step transformers "$python" -W ignore -m bench.gpu_transformers $dry --against "$out/engine.json" \
    --json "$out/transformers.json"
# Recompute, swap and auto through the three processes, cache on and off: total time and p99 TPOT.
if [ -n "$dry" ]; then
    # The interpreter is no place for a thousand steps: here the reference backend shows that the step runs.
    TRITON_INTERPRET=0
    step preemption "$python" -W ignore -m bench.preemption --model tiny --device cpu --attention-backend cpu \
        --workload little --repeat 1 --scale 0.1 --no-modelled
else
    step preemption "$python" -W ignore -m bench.preemption --model qwen3-0.6b --device cuda --repeat 1 \
        --workload thrash --workload long --no-modelled
fi

echo
failed=""
for name in warm compile kernels engine load transformers preemption; do
    status=$(cat "$out/$name.status" 2>/dev/null)
    [ "$status" = 0 ] || failed="$failed $name($status)"
    [ -f "$out/$name.log" ] || continue
    echo "== $name"
    case $name in
    compile) tail -n 2 "$out/$name.log" | head -n 1 ;;
    warm) tail -n 1 "$out/$name.log" ;;
    *) grep -v '^{' "$out/$name.log" ;;
    esac
done
[ -z "$failed" ] && echo "all steps passed" || echo "failed:$failed; logs in $out"
[ -z "$failed" ]
