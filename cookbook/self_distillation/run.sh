#!/usr/bin/env bash
# From the environment: STUDENT_MODEL_ID, PROMPTS, DEVICE, MAX_STEPS, OUTPUT_DIR; COMMAND=check
# resolves the run and trains nothing. KEY=VALUE goes after it.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec mopd "${COMMAND:-train}" cookbook/self_distillation/run.yaml \
  ${STUDENT_MODEL_ID:+"student.model=$STUDENT_MODEL_ID"} \
  ${PROMPTS:+"data.prompts=$PROMPTS"} \
  ${DEVICE:+"student.device=$DEVICE"} \
  ${MAX_STEPS:+"max_steps=$MAX_STEPS"} \
  ${OUTPUT_DIR:+"output_dir=$OUTPUT_DIR"} \
  "$@"
