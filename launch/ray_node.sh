#!/usr/bin/env bash
# Start Ray's daemon of one node in the foreground, or print the address of the node. slurm.sbatch and ssh.sh call it.
#
#   ray_node.sh address          print the IPv4 address of this node
#   ray_node.sh head             start the head
#   ray_node.sh worker           start a node of the cluster at HEAD, once that accepts connections
#   ray_node.sh slurm            start the head on the first node of a Slurm step, and a worker on the others
#   ray_node.sh worker-on-stdin  the same; read the token from standard input, and end when that is closed
#
# Settings, from the environment: docs/gpu.md has the list.
set -euo pipefail

node_name=${NODE_NAME:-${SLURMD_NODENAME:-$(hostname)}}

node_address() {
  local name=${NODE_ADDRESS:-} address
  if [ -n "${INTERFACE:-}" ]; then
    address=$(ip -4 -o addr show dev "$INTERFACE" | awk '{split($4, cidr, "/"); print cidr[1]; exit}')
  else
    if [ -z "$name" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
      name=$(scontrol show node -o "$node_name" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    fi
    name=${name:-$node_name}
    address=$(getent ahostsv4 "$name" | awk '{print $1; exit}')
    if [[ $address = 127.* && $address != "$name" ]]; then # /etc/hosts has the host's own name as 127.0.1.1
      address=$(hostname -I | awk '{print $1}')
    fi
  fi
  if [ -z "$address" ]; then
    echo "ray_node.sh: node $node_name has no IPv4 address (INTERFACE=${INTERFACE:-}, name $name)" >&2
    return 1
  fi
  echo "$address"
}

address=$(node_address)
if [ "$1" = address ]; then
  echo "$address"
  exit
fi

role=$1
if [ "$role" = slurm ]; then
  NUM_CPUS=${NUM_CPUS:-$SLURM_CPUS_ON_NODE} NUM_GPUS=${NUM_GPUS:-${SLURM_GPUS_ON_NODE:-0}}
  if [ "$SLURM_NODEID" = 0 ]; then role="head"; else role="worker"; fi
fi
if [ -n "${JOB_DIR:-}" ]; then exec >>"$JOB_DIR/ray-$node_name.log" 2>&1; fi
if [ -n "${VENV:-}" ]; then export PATH="$VENV/bin:$PATH"; fi
# Ray opens a file for every connection. It ends at once after TERM; newer versions wait for 30 seconds by default.
ulimit -n "$(ulimit -Hn)"
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-0}
options=(--node-ip-address="$address" --node-name="$node_name" --temp-dir="$RAY_TEMP_DIR" --disable-usage-stats --block)
if [ -n "${NUM_CPUS:-}" ]; then options+=(--num-cpus="$NUM_CPUS"); fi
if [ -n "${NUM_GPUS:-}" ]; then options+=(--num-gpus="$NUM_GPUS"); fi # without it, Ray counts the GPUs
read -r -a ports <<<"${RAY_PORTS:-}"
options+=("${ports[@]}")

wait_for_head() {
  local host=${HEAD%:*} port=${HEAD##*:}
  until (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null; do sleep 0.5; done
}

case $role in
  head) exec ray start --head --port="$RAY_PORT" --include-dashboard=false "${options[@]}" ;;
  worker)
    wait_for_head
    exec ray start --address="$HEAD" "${options[@]}"
    ;;
  worker-on-stdin)
    read -r RAY_AUTH_TOKEN
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
    (wait_for_head && exec ray start --address="$HEAD" "${options[@]}") </dev/null &
    daemon=$!
    (cat >/dev/null && kill -TERM "$daemon" 2>/dev/null) <&0 &
    wait "$daemon"
    ;;
  *) echo "ray_node.sh: $1; expected address, slurm, head, worker or worker-on-stdin" >&2 && exit 2 ;;
esac
