#!/usr/bin/env bash
# Check a machine with one GPU and no network: check.sh PARTS OUT, in the folder of this project.
# PARTS has what pack.py wrote; the names that are there are unpacked and used. Rows go to OUT, those that measure
# nothing side by side. An engine of vLLM runs with an interpreter of its own, a script that sets PYTHONPATH.
set -uo pipefail
parts=$1 out=$2 site=${SITE:-/tmp/site}
mkdir -p "$out"
names=$(find "$parts" -name '*.tar.xz.*' -printf '%f\n' | cut -d. -f1 | sort -u)
bash launch/offline/unpack.sh "$parts" "$site" $names || { echo "check.sh: $parts is incomplete" >&2; exit 2; }
for name in $names; do [ "$name" = vllm ] || export PYTHONPATH=$site/$name:${PYTHONPATH:-}; done
export PYTHONPATH=$PWD:$PYTHONPATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=4
if [ -d "$site/vllm" ]; then
    printf '#!/bin/bash\nexport PYTHONPATH=%s\nexec python3 "$@"\n' "$site/vllm" > "$site/vllm-python"
    chmod +x "$site/vllm-python"
    engine="--vllm-python $site/vllm-python"
fi
part() { timeout "${2:-240}" python3 -m mcontroller gpucheck --part "$1" ${engine:-} > "$out/part-$1.jsonl" 2> "$out/part-$1.log"; }
part a & part e & wait    # equality: side by side
part b; part c            # memory and speed: alone
timeout 240 python3 benchmarks/parts/train_step_gpu.py &> "$out/train-step.log"
if [ -d "$site/ray" ]; then
    part d
    [ -z "${engine:-}" ] || timeout 240 python3 benchmarks/asynchronous.py --engine "$site/vllm-python" --gpu 0 &> "$out/engine.log"
fi
grep -hv '"passed"' "$out"/part-*.jsonl
tail -qn 2 "$out"/*.log
