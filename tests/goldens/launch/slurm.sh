# mine on h100-16 (16 h100 chips, 2 hosts)
# cost of 16 h100 chips: $1,337.36 for 36.5 hours ($36.64 per hour) at the list price of $2.29 per chip-hour, spot price
# unknown (set spot_usd_per_hour=)
# 1. write the job
cat > mine.sbatch <<'END'
#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=36:30:00
#SBATCH --partition=gpu
#SBATCH --output=mine.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
export VALKYRIE_LAUNCH_RESTARTS=${SLURM_RESTART_COUNT:-0}
srun --kill-on-bad-exit=0 --wait=300 valkyrie-train model=gpt_1b mesh=16x1x1 name=mine
status=$?
case $status in
  0 | 2 | 130) ;;
  75) scontrol requeue "$SLURM_JOB_ID" ;;
  *) [ "$VALKYRIE_LAUNCH_RESTARTS" -ge 5 ] || scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $status
END
# 2. submit the job
sbatch mine.sbatch
# show the state of the job:
#   squeue --me --name=mine
# follow the log:
#   tail -F mine.log
# stop the job:
#   scancel --name=mine
