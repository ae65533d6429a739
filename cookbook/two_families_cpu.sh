#!/usr/bin/env bash
# Every way of teaching on the demo's list task, on a CPU: a teacher with the student's tokenizer,
# one with another (CTKD, GOLD, prefix KL), and both on one sample; one table at the end.
# From the environment: OUTPUT_DIR, STEPS (a pairing), SEED, PYTHON, TIME_LIMIT (as timeout takes
# it: 90m). More options go after it: --exercises 50, --model-steps 20.
set -euo pipefail
cd "$(dirname "$0")/.."
exec timeout "${TIME_LIMIT:-90m}" "${PYTHON:-python}" -m bench.pairings \
  ${OUTPUT_DIR:+--output-dir "$OUTPUT_DIR"} \
  ${STEPS:+--steps "$STEPS"} \
  ${SEED:+--seed "$SEED"} \
  "$@"
