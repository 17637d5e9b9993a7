#!/usr/bin/env bash
# Check a machine with one GPU and no network: check.sh PARTS OUT [STEP...], in the folder of this project.
# PARTS has what pack.py wrote; the names that are there are unpacked and used. Steps are the parts of gpucheck, a to e,
# train-step and engine; by default all. Rows and logs go to OUT. An engine of vLLM runs with an interpreter of its own, a
# script that sets PYTHONPATH.
set -uo pipefail
parts=$1 out=$2 site=${SITE:-/tmp/site}
steps=${*:3}
for step in $steps; do
    [[ $step =~ ^([a-e]|train-step|engine)$ ]] || { echo "check.sh: no step $step; the steps are a to e, train-step, engine" >&2; exit 2; }
done
mkdir -p "$out"
names=$(find "$parts" -name '*.tar.xz.*' -printf '%f\n' | cut -d. -f1 | sort -u)
bash launch/offline/unpack.sh "$parts" "$site" $names || { echo "check.sh: $parts is incomplete" >&2; exit 2; }
for name in $names; do [ "$name" = vllm ] || export PYTHONPATH=$site/$name:${PYTHONPATH:-}; done
export PYTHONPATH=$PWD:${PYTHONPATH:-} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=4
if [ -d "$site/vllm" ]; then
    printf '#!/bin/bash\nexport PYTHONPATH=%s\nexec python3 "$@"\n' "$site/vllm" > "$site/vllm-python"
    chmod +x "$site/vllm-python"
    engine="--vllm-python $site/vllm-python"
fi
# run STEP SECONDS COMMAND...: standard output goes to OUT/STEP.jsonl, and the rest to OUT/STEP.log.
run() {
    case " ${steps:-$1} " in *" $1 "*) timeout "$2" "${@:3}" > "$out/$1.jsonl" 2> "$out/$1.log" ;; esac
}
gpucheck() { run "$1" "$2" python3 -m mcontroller gpucheck --part "$1" ${engine:-}; }
gpucheck a 240 & gpucheck e 600 & wait    # equality: side by side
gpucheck b 240                            # memory and speed: alone
gpucheck c 900
run train-step 240 python3 benchmarks/parts/train_step_gpu.py
if [ -d "$site/ray" ]; then
    gpucheck d 600
    [ -z "${engine:-}" ] || run engine 240 python3 benchmarks/asynchronous.py --engine "$site/vllm-python" --gpu 0
fi
grep -hv '"passed"' "$out"/*.jsonl
tail -qn 2 "$out"/*.log
