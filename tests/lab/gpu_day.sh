#!/usr/bin/env bash
# Every check that needs an NVIDIA GPU, in one run of at most 8 minutes:
#
#     tests/lab/gpu_day.sh OUT                 all steps, in order
#     tests/lab/gpu_day.sh OUT STEP...         some of them, such as those that an earlier run had no time for
#     tests/lab/gpu_day.sh --rehearse OUT ...  on stand-ins of the driver's libraries; nothing of it is a measurement
#
# It needs this checkout, Python 3.11 or later, and the packages that the steps import. Wheels in .whl/ (for that Python)
# are installed into a temporary folder first; numpy, pyarrow and matplotlib may be the machine's own. It reads the GPU's
# clocks, limits and modes, uses its time and memory, and sets nothing.
#
# A step that fails or takes too long does not stop the others. Everything is written to OUT: one text and JSON file per
# step, power traces (Parquet) and charts; after each step also recorded.tar.gz, with all of them, and summary.txt.
set -u
rehearse=; [ "${1:-}" = --rehearse ] && { rehearse=1; shift; }
out=${1:?usage: tests/lab/gpu_day.sh [--rehearse] OUT [STEP...]}; shift
budget_s=${GPU_DAY_S:-455}
cd "$(dirname "$0")/../.." || exit
mkdir -p "$out"; out=$(cd "$out" && pwd)
# The recorded files are in a folder of their own: few files are easier to carry than many.
day=$(mktemp -d); site=$(mktemp -d); here=tests/lab/gpu_day
trap 'rm -rf "$day" "$site"' EXIT
python=${PYTHON:-python3}
export PYTHONPATH=$site:$PWD:$PWD/tests/support PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$site/compiled PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export MPLCONFIGDIR=$site HYPOTHESIS_STORAGE_DIRECTORY=$site
if [ "$rehearse" ]; then
    export FAULTBED_REHEARSAL=1 FAULTBED_REHEARSAL_STATE=$site/gpu
    export PYTHONPATH=$PWD/$here/rehearsal:$PYTHONPATH PATH=$PWD/$here/rehearsal:$PATH
    echo "REHEARSAL on stand-ins: nothing of this is a measurement" | tee "$out/summary.txt"
else
    : >"$out/summary.txt"
fi

say() { printf '%-12s %-8s %4s s  %s\n' "$@" | tee -a "$out/summary.txt"; }

# step NAME SECONDS LEAST COMMAND...: at most SECONDS; not started if fewer than LEAST seconds of the budget are left.
chosen=" $* "
step() {
    local name=$1 most=$2 least=$3 began=$SECONDS left=$((budget_s - SECONDS)) rc; shift 3
    [ "$chosen" = "  " ] || case $chosen in *" $name "*) ;; *) return ;; esac
    if [ "$left" -lt "$least" ]; then
        say "$name" LEFT 0 "only $left s were left; run it with: tests/lab/gpu_day.sh OUT $name"
        return
    fi
    [ "$most" -le "$left" ] || most=$left
    echo "== $name (at most $most s)"
    timeout -k 5 "$most" "$@" >"$day/$name.txt" 2>&1; rc=$?
    grep -hE '^(ok|FAILED|ERROR|SKIPPED)|^=+ .*(passed|failed|error)|Error' "$day/$name.txt" | cut -c1-200 | tail -30
    [ $rc -eq 0 ] || tail -n 5 "$day/$name.txt" | cut -c1-200
    case $rc in
        0) say "$name" ok $((SECONDS - began)) "" ;;
        124 | 137) say "$name" TIMEOUT $((SECONDS - began)) "more than $most s" ;;
        *) say "$name" FAILED $((SECONDS - began)) "exit code $rc; $(grep -c '^FAILED' "$day/$name.txt") lines of failed checks" ;;
    esac
    cp "$day"/*.png "$day"/*.parquet "$out" 2>/dev/null
    cp "$out/summary.txt" "$day"; tar -C "$day" -czf "$out/.new" . && mv "$out/.new" "$out/recorded.tar.gz"
}

wheels() {
    [ -z "$rehearse" ] && ls .whl/*.whl >/dev/null 2>&1 || { echo "ok: no wheels are installed"; return; }
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
    "$python" -c 'import msgspec, pynvml, numpy, pytest, pyarrow; print("ok: Python packages", numpy.__version__, pyarrow.__version__)'
}

tests() {
    local common=(-p no:cacheprovider -p pytest_timeout -rA --timeout 100 --durations 10 --junitxml "$day/test_gpu.xml")
    local plugin=(-p faultbed.harness.pytest_plugin.hooks)
    if ! "$python" -m pytest "${plugin[@]}" -p pytest_timeout -q --collect-only tests/lab/test_gpu.py; then
        echo "our plugin cannot be loaded: the tests run without it"
        plugin=(-c $here/pytest.ini --rootdir .)
    fi
    "$python" -m pytest "${plugin[@]}" "${common[@]}" tests/lab/test_gpu.py
}
export -f wheels tests; export python site day here rehearse

step wheels      60  1 bash -c wheels
step before      40 10 "$python" $here/machine.py "$day" before
step readers     60 20 "$python" $here/readers.py "$day"
step plans       75 20 "$python" $here/plans.py "$day"
step tests      150 60 bash -c tests
step power-fma  120 75 "$python" $here/square_wave.py "$day" fma
step straggler  120 40 "$python" $here/straggler.py "$day"
step power-matmul 150 90 "$python" $here/square_wave.py "$day" matmul
step after       30  5 "$python" $here/machine.py "$day" after
echo; cat "$out/summary.txt"
! grep -qE ' (FAILED|TIMEOUT|LEFT) ' "$out/summary.txt"
