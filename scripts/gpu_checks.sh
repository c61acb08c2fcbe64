#!/usr/bin/env bash
# Everything that needs a GPU, in parts, results in the folder OUT (default: gpu-results):
#
#   scripts/gpu_checks.sh [tests] [sanitizer] [kernels] [recurrences] [profile] [generate] [speculation] [multigpu] [tune]
#
# No part named: all but tune. PYTHON names the interpreter (default: that of .venv), WORKERS the test processes (default: cores
# less two), WHEEL a wheel of mamba_ssm and FLA one of flash-linear-attention for the baselines. Each part goes on to the
# next one when it fails; the exit status says whether any did. compute-sanitizer comes with CUDA; it runs on few small cases, each kernel compiled before.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-gpu-results} PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-$(($(nproc) > 3 ? $(nproc) - 2 : 1))}
export PYTHONPATH=src:kernels/torch-ext:scripts:tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$OUT"
baseline=(${WHEEL:+--mamba-ssm "$WHEEL"})
failed=0

part() { # name, limit in seconds, command: its output to OUT/name.txt, and its last lines here
    local name=$1 limit=$2
    shift 2
    # A session of its own: what is left of it when the time is up must not disturb the next part.
    setsid timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.txt" 2>&1 &
    local pid=$!
    wait "$pid"
    local status=$?
    pkill -KILL --session "$pid" 2>/dev/null
    echo "== $name: $([ $status = 0 ] && echo passed || echo "exit status $status") after $SECONDS s"
    tail -n 3 "$OUT/$name.txt"
    [ $status = 0 ] || failed=1
}

pytest=("$PYTHON" -m pytest -m gpu -p no:cacheprovider --show-capture=no --tb=short)

tests() {
    OMP_NUM_THREADS=1 part tests 900 "${pytest[@]}" tests -n "$WORKERS" -v
}

# Memory and races, of steps, windows, flushes, convolutions and norms in all dtypes, without torch's memory pool.
SANITIZED=(
    "test_dtypes and bfloat16" "test_dtypes and float32" "test_every_kind and bfloat16" "test_every_kind and float32"
    "test_a_flush_alone or permuted or rows_do_not or all_phases" "test_variants" "test_token_by_token"
    "test_sizes and Granite" "test_layouts" "test_8_bits and not models"
)
sanitizer() {
    local files=(tests/kernels/test_{mamba2,mamba1,gated_delta,causal_conv,rms_norm}.py)
    local which
    which=$(printf ' or (%s)' "${SANITIZED[@]}")
    OMP_NUM_THREADS=1 part sanitizer-warm 300 "${pytest[@]}" "${files[@]}" -n "$WORKERS" -q -k "${which:4}"
    local tool number pids=()
    for tool in memcheck racecheck; do
        number=0
        for which in "${SANITIZED[@]}"; do
            number=$((number + 1))
            OMP_NUM_THREADS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 part "$tool-$number" 300 \
                compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
                "${pytest[@]}" "${files[@]}" -q -k "$which" &
            pids+=($!)
        done
    done
    wait "${pids[@]}"
    grep -h "SUMMARY" "$OUT"/memcheck-*.txt "$OUT"/racecheck-*.txt | sort | uniq -c
    [ "$(cat "$OUT"/memcheck-*.txt "$OUT"/racecheck-*.txt | grep -cE "SUMMARY: 0 ")" = $((2 * number)) ] || failed=1
}

kernels() {
    part kernels 300 "$PYTHON" scripts/benchmark_kernels.py "${baseline[@]}" --geometry Nemotron-H-8B --budget-ms 12 \
        --windows 5:32 8:32 5:64 8:64 --window-batch 32 128 --precompile 16 --json "$OUT/kernels.json"
    part geometries 300 "$PYTHON" scripts/benchmark_kernels.py "${baseline[@]}" --batch 8 128 512 --budget-ms 6 --full \
        --geometry Nemotron-3-Nano-4B Bamba-9B mamba2-2.7b Zamba2-7B Falcon-H1-34B --windows --precompile 16 \
        --json "$OUT/geometries.json"
}

recurrences() { # besides Mamba-2
    part mamba1 300 "$PYTHON" scripts/benchmark_mamba1.py "${baseline[@]}" --budget-ms 12 --json "$OUT/mamba1.json"
    part gated-delta 300 "$PYTHON" scripts/benchmark_gated_delta.py ${FLA:+--fla "$FLA"} --json "$OUT/gated-delta.json"
    local device=(--device cuda --tokens 8192 --heads 128 --groups 8 --dtype bfloat16)
    part scan 180 "$PYTHON" scripts/benchmark_scan.py "${device[@]}" ${FLA:+--fla "$FLA"}
}
tune() { # checkpoints of 8 bits: configs.json has no rows of their windows and of small batches yet
    part tune-8-bits 300 "$PYTHON" scripts/tune_kernels.py --checkpoint int8 --batch 1 8 32 128 512 --tokens 1 8 \
        --workers "$WORKERS" --json "$OUT/configs-8-bits.json"
    part kernels-8-bits 300 "$PYTHON" scripts/benchmark_kernels.py "${baseline[@]}" --geometry Nemotron-H-8B --full \
        --checkpoint fp32 int8 fp8 --batch 32 128 512 --windows --precompile 16 --json "$OUT/kernels-8-bits.json"
}

profile() {
    part profile 120 "$PYTHON" scripts/profile_kernels.py
}

generate() {
    part generate 600 "$PYTHON" scripts/benchmark_generate.py --device cuda "${baseline[@]}" \
        --batch 1 32 128 256 512 --compiled-batch 1 256 --json "$OUT/generate.json"
}

speculation() {
    part speculation 600 "$PYTHON" scripts/benchmark_speculative.py --device cuda --json "$OUT/speculation.json"
}

multigpu() { # needs two; passes over the rest with one
    if ! "$PYTHON" -c "import sys, torch; sys.exit(torch.cuda.device_count() < 2)"; then
        echo "== multigpu: passed over, there is one GPU"
        return
    fi
    OMP_NUM_THREADS=4 part multigpu-tests 600 "$PYTHON" -m pytest -m multigpu -p no:cacheprovider --tb=short tests -v
    part multigpu 600 "$PYTHON" scripts/benchmark_multigpu.py --device cuda --json "$OUT/multigpu.json"
}

for name in "${@:-tests sanitizer kernels recurrences profile generate speculation multigpu}"; do
    for name in $name; do
        case $name in
            tests | sanitizer | kernels | recurrences | profile | generate | speculation | multigpu | tune) $name ;;
            *) echo "gpu_checks: no part '$name'; see the head of the script" >&2 && exit 2 ;;
        esac
    done
done
exit $failed
