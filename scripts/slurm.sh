#!/usr/bin/env bash
# Train under Slurm, and go on in a new allocation when the time is over:
#   sbatch scripts/slurm.sh experiment=imagenet256_xl2 model=tread
# DOOR=fid.py sbatch scripts/slurm.sh checkpoint=… scores on its GPUs.
# Submit it from the repository's root, with the environment active. The lines below are to be edited.
#SBATCH --job-name=tread
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8    # a process for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300      # 300 s before the end: finish the step, save, exit with 75
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -uo pipefail
if [[ "${1:-}" =~ ^(-h|--help)$ ]]; then
  sed -n '2,/^[^#]/ s/^# //p' "${BASH_SOURCE[0]}"
  exit
fi

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# No launcher between Slurm and the processes, so that signals and exit codes pass. The first process that ends
# does not take the others along while they save; those that hang after a crash are ended after 300 s.
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} --kill-on-bad-exit=0 --wait=300 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
  [ "${DOOR:-train.py}" = train.py ] && set -- train.processes=$SLURM_NTASKS "$@"
  exec python "${DOOR:-train.py}" "$@"' bash "$@"
code=$?

if [ "$code" -eq 75 ]; then  # interrupted and saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
