#!/usr/bin/env bash
# A real SLURM on one machine, for trying out elasticity and for its tests: slurmctld, munge and one
# slurmd for each of four virtual nodes n0 to n3. Nothing of the system's own SLURM or munge is
# touched; all files are in one folder.
#
#   scripts/slurm/local_cluster.sh start DIR [NODES]
#   SLURM_CONF=DIR/slurm.conf sinfo
#   scripts/slurm/local_cluster.sh stop DIR
#
# Needs the packages slurm-wlm and munge (Debian, Ubuntu).
set -euo pipefail

usage() {
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

[ $# -ge 2 ] || usage
action=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)
nodes=${3:-4}
export SLURM_CONF=$dir/slurm.conf
PATH=$PATH:/usr/sbin:/sbin

need() {
  for program in "$@"; do
    command -v "$program" > /dev/null || {
      echo "$program is missing: install the packages slurm-wlm and munge" >&2
      exit 1
    }
  done
}

write_config() {
  local host base last
  host=$(hostname -s)
  base=${DYNMO_SLURM_PORT:-17000}
  last=$((nodes - 1))
  cat > "$SLURM_CONF" << CONF
ClusterName=dynmo
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
KillWait=5
WaitTime=5
SchedulerParameters=sched_interval=2,bf_interval=2,defer_batch
MailProg=/bin/true
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdSpoolDir=$dir/spool.%n
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmdLogFile=$dir/slurmd.%n.log
NodeName=n[0-$last] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((base + 1))-$((base + nodes))] CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
  need munged slurmctld slurmd sinfo
  mkdir -p "$dir/state"
  write_config
  if [ ! -f "$dir/munge.key" ]; then
    (umask 077 && head -c 1024 /dev/urandom > "$dir/munge.key")
  fi
  munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
    --log-file="$dir/munged.log" --pid-file="$dir/munged.pid" --seed-file="$dir/munged.seed"
  slurmctld -f "$SLURM_CONF"
  for node in $(seq 0 $((nodes - 1))); do
    mkdir -p "$dir/spool.n$node"
    slurmd -f "$SLURM_CONF" -N "n$node"
  done
  for _ in $(seq 1 60); do
    if [ "$(sinfo -h -N -t idle -o %N 2> /dev/null | wc -l)" -eq "$nodes" ]; then
      echo "export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 1
  done
  echo "the virtual nodes are not idle after a minute; see the logs in $dir" >&2
  sinfo -N >&2 || true
  exit 1
}

stop() {
  [ -f "$SLURM_CONF" ] || return 0
  scancel --quiet --user "$(id -un)" 2> /dev/null || true
  # A slurmd that is told to end while its job is ending stays.
  for _ in $(seq 1 20); do
    [ -n "$(squeue -h 2> /dev/null)" ] || break
    sleep 0.5
  done
  local pids
  pids=$(cat "$dir"/slurmd.*.pid "$dir/slurmctld.pid" "$dir/munged.pid" 2> /dev/null) || true
  for pid in $pids; do kill "$pid" 2> /dev/null || true; done
  # Until they have ended, their ports are taken.
  for _ in $(seq 1 50); do
    for pid in $pids; do
      if is_alive "$pid"; then sleep 0.1 && continue 2; fi
    done
    return 0
  done
  echo "of the processes $pids some do not end; see the logs in $dir" >&2
}

is_alive() {
  local state
  state=$(ps -o stat= -p "$1") && [ "${state#Z}" = "$state" ]
}

case $action in
  start) start ;;
  stop) stop ;;
  *) usage ;;
esac
