#!/usr/bin/env bash
# Remove four layers of a language model, and repair it on-policy with the whole one as the teacher;
# or distil any student from any teacher, by name on the Hugging Face hub or by folder. Held-out
# measures before and after, on a CPU or an accelerator.
# From the environment: TEACHER (default SmolLM2-135M-Instruct), STUDENT, STEPS, DEVICE, OUTPUT_DIR,
# PYTHON. More options go after it, such as --student-tokenizer FILE for another tokenizer.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m bench.language_model \
  --teacher "${TEACHER:-HuggingFaceTB/SmolLM2-135M-Instruct}" \
  --folder "${OUTPUT_DIR:-runs/pruned-model}" \
  ${STUDENT:+--student "$STUDENT"} \
  ${STEPS:+--steps "$STEPS"} \
  ${DEVICE:+--device "$DEVICE"} \
  "$@"
