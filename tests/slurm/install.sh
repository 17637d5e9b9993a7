#!/usr/bin/env bash
# Install Slurm, munge and an ssh server with apt if they are missing; otherwise say what to install.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
missing=""
for program in slurmctld slurmd srun munged ssh sshd; do
  command -v "$program" >/dev/null || missing="$missing $program"
done
if [ "$(id -u)" != 0 ]; then
  echo "make test-slurm needs root: slurmd starts jobs as their users. Run it as root, for example in a container" >&2
  exit 1
fi
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null; then
  echo "make test-slurm needs$missing, and there is no apt-get: install Slurm, munge and OpenSSH with your package manager" >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge openssh-client openssh-server >/dev/null
