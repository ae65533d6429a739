#!/usr/bin/env bash
# Writes the locks anew, with the versions of the environment that the tests ran in.
# Needs uv and a .venv made by `make test`: bash requirements/compile.sh
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
tested=$(mktemp)
trap 'rm -f "$tested"' EXIT
"$bin/python" -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' | grep -v '^torch==' > "$tested"
lock() {
  local output=$1
  shift
  "$bin/uv" pip compile --quiet --no-header --no-annotate --python-version 3.11.13 \
    --python-platform x86_64-unknown-linux-gnu --no-emit-index-url \
    --override requirements/without_torch.txt --constraint "$tested" --output-file "$output" "$@"
}
for extra in server trainer ray lora dev docs; do
  lock "requirements/$extra.txt" --extra "$extra" pyproject.toml
done
lock requirements/client.txt pyproject.toml
# What the NPU image lacks beside its own torch, transformers and vLLM: ranges, not versions.
"$bin/python" - <<'PYTHON' > requirements/npu.txt
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["server"]
print("\n".join(sorted(w for w in wanted if not w.startswith(("torch", "transformers")))))
PYTHON
