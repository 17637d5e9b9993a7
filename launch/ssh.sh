#!/usr/bin/env bash
# Run a driver on a Ray cluster of machines that this one reaches with ssh. docs/gpu.md explains this file.
# Status: tried by hand on one machine.
#
#   launch/ssh.sh hosts.txt python train.py run_dir=/shared/runs/first
#
# A line of hosts.txt is a host name as ssh takes it, and the address of the host if it has several. The first line is
# this machine, with the head and the driver. All machines have this folder, and the environment, under the same path.
set -euo pipefail

# Settings: change them here, or set them in the environment.
export LAUNCH_DIR=${LAUNCH_DIR:-$PWD/launch}               # the folder with ray_node.sh and ray_nodes.py
export JOB_DIR=${JOB_DIR:-$PWD/ssh-$(date +%Y%m%d-%H%M%S)} # logs and the token; on this machine
export VENV=${VENV:-}                                      # a virtual environment, on every machine
export INTERFACE=${INTERFACE:-}                            # such as bond0; default: the one of hosts.txt or the name
export RAY_TEMP_DIR=${RAY_TEMP_DIR:-/tmp/ray-$(id -un)}    # Ray's sessions and logs: short, on the machine itself
export RAY_PORT=${RAY_PORT:-6379}                          # of the head
export RAY_PORTS=${RAY_PORTS:-}                            # options of ray start that fix the other ports
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
START_TIMEOUT=${START_TIMEOUT:-300}                        # seconds until all machines must have joined
SSH=${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15}

if [ $# -lt 2 ]; then
  echo "usage: launch/ssh.sh HOSTS_FILE COMMAND [ARGUMENT...]" >&2
  exit 2
fi
mapfile -t hosts < <(grep -vE '^[[:space:]]*(#|$)' "$1")
shift
if [ "${#hosts[@]}" = 0 ]; then
  echo "launch/ssh.sh: the host list has no host" >&2
  exit 2
fi
if [ -n "$INTERFACE" ]; then
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$INTERFACE} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE}
fi
if [ -n "$VENV" ]; then export PATH="$VENV/bin:$PATH"; fi

mkdir -p "$JOB_DIR"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$JOB_DIR/ray-token
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")

started=()
connections=()
# shellcheck disable=SC2329  # the traps call it
cleanup() {
  trap - EXIT INT TERM
  for fd in "${connections[@]}"; do exec {fd}>&-; done # a closed connection ends the machine's daemon
  for pid in "${started[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  wait "${started[@]}" 2>/dev/null || true
  rm -f "$RAY_AUTH_TOKEN_PATH" "$JOB_DIR/attach.sh"
}
without_connections() {
  for fd in "${connections[@]}"; do exec {fd}>&-; done
  exec "$@"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

read -r name address <<<"${hosts[0]}"
names=("$name")
HEAD=$(NODE_NAME=$name NODE_ADDRESS=$address "$LAUNCH_DIR/ray_node.sh" address):$RAY_PORT
export HEAD RAY_ADDRESS=$HEAD
NODE_NAME=$name NODE_ADDRESS=$address "$LAUNCH_DIR/ray_node.sh" head </dev/null &
started+=($!)
echo "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH RAY_ADDRESS=$HEAD" >"$JOB_DIR/attach.sh"

# What the ranks of every machine read as they start: a variable, or all with this prefix. Not the GPUs of this machine.
forwarded='NCCL_|GLOO_|TORCH_|PYTORCH_|NVTE_|VLLM_|UCX_|CUDA_DEVICE_MAX_CONNECTIONS$|LD_LIBRARY_PATH$|HF_HOME$|HF_HUB_OFFLINE$'
mapfile -t forwarded < <(compgen -e | grep -E "^($forwarded)")
# The settings are part of the remote command; the token is not: it goes through standard input, which stays open.
for host in "${hosts[@]:1}"; do
  read -r name address <<<"$host"
  names+=("$name")
  remote="cd $(printf %q "$PWD") && exec env"
  for variable in "NODE_NAME=$name" "NODE_ADDRESS=$address" JOB_DIR= "PATH=$PATH" "PYTHONPATH=${PYTHONPATH:-}" \
    "VENV=$VENV" "INTERFACE=$INTERFACE" "RAY_TEMP_DIR=$RAY_TEMP_DIR" "RAY_PORTS=$RAY_PORTS" "HEAD=$HEAD" \
    "OMP_NUM_THREADS=$OMP_NUM_THREADS"; do
    [ -z "${variable#*=}" ] || remote+=" $(printf %q "$variable")"
  done
  for variable in "${forwarded[@]}"; do remote+=" $variable=$(printf %q "${!variable}")"; done
  remote+=" $(printf %q "$LAUNCH_DIR/ray_node.sh") worker-on-stdin"
  # shellcheck disable=SC2086  # SSH is a command with its options
  exec {connection}> >(without_connections $SSH "$name" "$remote" >"$JOB_DIR/ray-$name.log" 2>&1)
  started+=($!)
  connections+=("$connection")
  # A subshell, because a connection that ended already would end this script with SIGPIPE and without a message.
  if ! (cat "$RAY_AUTH_TOKEN_PATH" && echo) >&"$connection"; then
    echo "launch/ssh.sh: the connection to $name ended; $JOB_DIR/ray-$name.log has what it printed" >&2
    exit 1
  fi
done

python "$LAUNCH_DIR/ray_nodes.py" wait --timeout="$START_TIMEOUT" "${names[@]}" &
started+=($!)
wait $!
without_connections "$@" &
driver=$!
trap 'kill -TERM "$driver" 2>/dev/null' INT TERM
while kill -0 "$driver" 2>/dev/null; do wait "$driver" || true; done # a signal to this script interrupts wait
status=0
wait "$driver" || status=$?
if [ "$status" != 0 ]; then
  lost=$(python "$LAUNCH_DIR/ray_nodes.py" lost "${names[@]}") || echo "launch/ssh.sh: lost $lost" >&2
fi
exit "$status"
