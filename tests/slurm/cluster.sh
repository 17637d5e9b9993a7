#!/usr/bin/env bash
# Start or stop a Slurm cluster of two nodes with four fake GPUs each, on this machine, without systemd.
#
#   tests/slurm/cluster.sh start FOLDER      then: export SLURM_CONF=FOLDER/slurm.conf; sinfo
#   tests/slurm/cluster.sh node FOLDER n2    start the daemon of one node again
#   tests/slurm/cluster.sh stop FOLDER
#
# Each node has a separate address on the loopback interface, so Ray sees two machines. A GPU is a device file that
# nothing opens. A node that does not answer is down after 40 seconds.
set -euo pipefail
command=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
export SLURM_CONF=$folder/slurm.conf

stop() {
  local file pid
  for file in "$folder"/slurmd-*.pid "$folder/slurmctld.pid" "$folder/munged.pid"; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    kill "$pid" 2>/dev/null || continue
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
  done
}

write_configuration() {
  mkdir -p "$folder/state" "$folder/spool-n1" "$folder/spool-n2" "$folder/log"
  cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort=17000
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
SlurmdTimeout=40
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=1
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=30
GresTypes=gpu
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.1.1 Port=17001 CPUs=8 RealMemory=8000 Gres=gpu:4
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.1.2 Port=17002 CPUs=8 RealMemory=8000 Gres=gpu:4
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
  for gpu in 0 1 2 3; do
    [ -e "$folder/gpu$gpu" ] || mknod "$folder/gpu$gpu" c 1 $((3 + gpu))
  done
  printf 'AutoDetect=off\nNodeName=n[1-2] Name=gpu File=%s/gpu[0-3]\n' "$folder" >"$folder/gres.conf"
}

start_munge() {
  [ -s "$folder/munge.key" ] || dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 status=none
  chmod 600 "$folder/munge.key"
  munged --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
    --seed-file="$folder/munge.seed" --log-file="$folder/log/munged.log" --force
}

wait_until_idle() {
  for _ in $(seq 150); do
    [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && return
    sleep 0.2
  done
  echo "the nodes did not become idle within 30 s; the logs are in $folder/log" >&2
  sinfo -N -l >&2 || true
  exit 1
}

case $command in
  start)
    write_configuration
    start_munge
    slurmctld -f "$SLURM_CONF"
    for node in n1 n2; do slurmd -f "$SLURM_CONF" -N "$node"; done
    wait_until_idle
    ;;
  node) slurmd -f "$SLURM_CONF" -N "$3" && wait_until_idle ;;
  stop) stop ;;
  *) echo "usage: cluster.sh start|stop FOLDER, cluster.sh node FOLDER NODE" >&2 && exit 2 ;;
esac
