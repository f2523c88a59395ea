# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts here: named steps with a log each, a line of progress, and counts for the closing line.

steps_passed=0
steps_failed=0
steps_skipped=0
step_logs="${step_logs:-build/logs}"

# step NAME COMMAND...: runs the command with its output in a log. A step whose log counts tests (see count_in) counts as
# so many; any other counts as one. Returns the command's status.
step() {
  local name="$1" log status=0 begin=$SECONDS line
  shift
  mkdir -p "$step_logs"
  log="$step_logs/${name//[^a-zA-Z0-9]/-}.log"
  if [[ -t 1 ]]; then
    "$@" >"$log" 2>&1 </dev/null &
    local job=$!
    trap 'kill '"$job"' 2>/dev/null; exit 130' INT TERM
    while kill -0 "$job" 2>/dev/null; do
      line="$(tail -c 300 "$log" | tail -n 1 | tr -dc '[:print:]')"
      printf '\r\033[K  … %s %ds  %.60s' "$name" $((SECONDS - begin)) "$line"
      sleep 0.3
    done
    wait "$job" || status=$?
    trap - INT TERM
    printf '\r\033[K'
  else
    "$@" >"$log" 2>&1 </dev/null || status=$?
  fi
  local passed=0 failed=0 skipped=0
  if count_in "$log"; then line=" ($passed passed, $failed failed)"; else line=""; fi
  if [[ -z "$line" ]] && ((status == 0)); then passed=1; fi
  # A command that fails without saying which test did is one failure of its own.
  if ((status != 0 && failed == 0)); then failed=1; fi
  steps_passed=$((steps_passed + passed))
  steps_failed=$((steps_failed + failed))
  steps_skipped=$((steps_skipped + skipped))
  if ((status == 0)); then
    printf '  ok      %-28s %4d s%s\n' "$name" $((SECONDS - begin)) "$line"
  else
    printf '  FAILED  %-28s %4d s%s, exit status %d; the end of %s:\n' "$name" $((SECONDS - begin)) "$line" "$status" "$log"
    tail -n 40 "$log" | sed 's/^/    | /'
  fi
  return "$status"
}

# Sets passed, failed and skipped from the last line of a log that counts, whoever wrote it: "N passed, N failed, N skipped"
# (scripts), "N run, N failed" (tessera verify), "N kernels, N failed" (tessera compile) or "… N problems …, N failed" (tessera
# random).
count_in() {
  local pattern='^([0-9]+) passed, ([0-9]+) failed(, ([0-9]+) skipped)?|^([0-9]+) (run|kernels), ([0-9]+) failed'
  pattern+='|: ([0-9]+) problems .*, ([0-9]+) failed'
  local last
  last="$(grep -aE "$pattern" "$1" | tail -n 1)"
  if [[ ! "$last" =~ $pattern ]]; then return 1; fi
  failed=$((10#${BASH_REMATCH[2]:-0} + 10#${BASH_REMATCH[7]:-0} + 10#${BASH_REMATCH[9]:-0}))
  passed=${BASH_REMATCH[1]:-$((10#${BASH_REMATCH[5]:-0} + 10#${BASH_REMATCH[8]:-0} - failed))}
  skipped=${BASH_REMATCH[4]:-0}
}

# Prints the closing line; returns 1 if anything failed.
steps_close() {
  local tail=""
  if ((steps_skipped > 0)); then tail=", $steps_skipped skipped"; fi
  echo "$steps_passed passed, $steps_failed failed$tail"
  ((steps_failed == 0))
}

# Prints the header of the calling script (the comment under its SPDX line) as its help.
print_help() {
  sed -n '3,/^[^#]/{s/^# \{0,1\}//p}' "$0"
}

# Processors this process may use: a container or taskset may allow fewer than the machine has.
jobs() { nproc; }
