#!/usr/bin/env bash
# Two teachers on Ray Serve, one of them with two replicas, and a student that learns from both, on
# one CPU machine. Models and prompts are those of `mopd demo`, which runs first if they are missing.
# From the environment: MODELS (a folder with sums-teacher, words-teacher and student), PROMPTS,
# MAX_STEPS, PORT, OUTPUT_DIR, RAY_ADDRESS (a cluster that runs; else a new one). KEY=VALUE goes after it.
set -euo pipefail
cd "$(dirname "$0")/.."
models="${MODELS:-runs/demo/models}" output="${OUTPUT_DIR:-runs/ray-serve}" port="${PORT:-8000}"
[ -d "$models/student" ] || mopd demo --steps 1
mkdir -p "$output"
cat > "$output/teachers.yaml" <<END
port: $port
teachers:
  - {name: sums, model: $models/sums-teacher, replicas: 2, num_cpus: 0.5}
  - {name: words, model: $models/words-teacher, num_cpus: 0.5}
END
cat > "$output/run.yaml" <<END
output_dir: $output/run
max_steps: ${MAX_STEPS:-20}
data: {prompts: ${PROMPTS:-runs/demo/prompts.jsonl}}
student: {model: $models/student, device: cpu, learning_rate: 1.0e-3}
rollout: {prompts_per_step: 16, max_new_tokens: 12}
teachers:
  sums: {url: "http://127.0.0.1:$port/sums", top_k: 16}
  words: {url: "http://127.0.0.1:$port/words", top_k: 16}
END
mopd-teacher deploy "$output/teachers.yaml" --address "${RAY_ADDRESS:-local}" \
  > "$output/deploy.log" &
deployment=$!
trap 'kill $deployment && wait $deployment' EXIT
until grep -q "all teachers are ready" "$output/deploy.log"; do
  kill -0 $deployment
  sleep 1
done
mopd train "$output/run.yaml" "$@"
