#!/usr/bin/env bash
# Checks Armillary on one GPU in at most 8 minutes, and prints a short report.
#
#   benchmarks/gpu.sh            # on a GPU; exit code 1 if something failed
#   benchmarks/gpu.sh --try      # on a CPU with tiny sizes, to check this script
#
# It runs quick tests of the inner loop and of checkpoints, trains `mlp` and `gpt` next
# to the loop by hand, and saves and resumes `gpt` in a second process.
#
#   PYTHON   an interpreter with Armillary's packages; by default .venv/bin/python
#   OUT      the folder of the logs and of gpu.json; by default runs/gpu
#   LIMIT    the seconds of all parts together; by default 480
set -uo pipefail

python=${PYTHON:-$PWD/.venv/bin/python}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out=${OUT:-runs/gpu}
limit=${LIMIT:-480}

platform=gpu
tasks=(mlp gpt)
speed=(--rounds 3 --seconds-per-burst 1 --steps-per-loop 10 100)
size=full
tests=(
  tests/trainer/test_loop.py tests/trainer/test_loop_end.py tests/trainer/test_hooks.py
  tests/trainer/test_non_finite.py tests/trainer/test_resident.py
  tests/trainer/test_accumulate.py tests/trainer/test_step_trainer.py
  tests/state/test_lift.py
  tests/checkpoint/test_round_trip.py tests/checkpoint/test_manager.py
)
# These three need a second device.
for name in \
  tests/trainer/test_step_trainer.py::test_an_update_without_a_reduction_is_refused \
  tests/checkpoint/test_round_trip.py::test_a_save_of_replicas_compiles_nothing \
  tests/checkpoint/test_round_trip.py::test_free_arrays_stay_free_and_on_a_device_that_is_not_the_default
do
  tests+=(--deselect "$name")
done

if [ "${1:-}" = --try ]; then
  platform=cpu
  export JAX_PLATFORMS=cpu
  speed=(--quick --rounds 1)
  size=small
  tests=(tests/trainer/test_loop.py -k two_attributes)
elif [ $# -gt 0 ]; then
  echo "gpu.sh: \`$1\` is no option. Use \`--try\`, or no option on a GPU." >&2
  exit 2
fi

if [ ! -x "$(command -v "$python")" ]; then
  echo "gpu.sh: there is no \`$python\`. Run \`make setup\`, or set PYTHON." >&2
  exit 2
fi
mkdir -p "$out"
json=$out/gpu.json
rm -f "$json"
# The tests compile as a user does. Several processes share the device, and each would reserve most of its memory.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
[ "$platform" = cpu ] || export JAX_DISABLE_MOST_OPTIMIZATIONS=0

found=$("$python" -c 'import jax
device = jax.devices()[0]
print(device.platform, device.device_kind, "with JAX", jax.__version__)' 2> "$out/device.log")
if [ "${found%% *}" != "$platform" ]; then
  echo "gpu.sh: JAX finds ${found:-no device}, and this check needs a $platform." >&2
  echo "Install \`armillary[gpu]\` on a machine with a GPU. $out/device.log has more." >&2
  exit 2
fi
echo "${found#* }"

# run NAME PATTERN COMMAND...: runs a part, and shows the lines of its output that match.
failed=()
run() {
  local name=$1 pattern=$2 start=$SECONDS status=0
  local log=$out/$name.log
  local rest=$((limit - SECONDS))
  shift 2
  if [ "$rest" -le 0 ]; then
    echo "== $name: left out, because $limit s are over"
    failed+=("$name")
    return
  fi
  timeout --kill-after=10 "$rest" "$@" > "$log" 2>&1 || status=$?
  local result=ok
  if [ "$status" -ne 0 ]; then
    result="failed with exit code $status, see $log"
    [ "$status" -ne 124 ] || result="stopped after $rest s, see $log"
    failed+=("$name")
  fi
  echo "== $name: $result ($((SECONDS - start)) s)"
  grep -E "$pattern" "$log" || true
}

run tests '^(FAILED|ERROR)| (passed|failed)' \
  env JAX_PLATFORMS="${JAX_PLATFORMS:-cuda,cpu}" \
  XLA_FLAGS=--xla_force_host_platform_device_count=1 \
  "$python" -m pytest -q -m "not slow" "${tests[@]}"

run speed '^[0-9]+ of [0-9]+:|steps/s \(|FAILED|left out' \
  "$python" -m benchmarks --tasks "${tasks[@]}" "${speed[@]}" \
  --contestants reference-scan armillary --json "$json"

run resume '│|on gpt' \
  "$python" -m benchmarks.lifecycle --tasks gpt --size "$size" --json "$json"

echo "== ${#failed[@]} of 3 parts failed: ${failed[*]:-none}. $SECONDS s of $limit s."
[ ${#failed[@]} -eq 0 ]
