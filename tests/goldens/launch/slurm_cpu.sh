# 1. write the job
cat > mine.sbatch <<'END'
#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=mine.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
export VALKYRIE_LAUNCH_RESTARTS=${SLURM_RESTART_COUNT:-0}
srun --kill-on-bad-exit=0 --wait=300 valkyrie-train model=gpt_tiny mesh=2x1x1 name=mine
status=$?
case $status in
  0 | 2 | 130) ;;
  75) scontrol requeue "$SLURM_JOB_ID" ;;
  *) [ "$VALKYRIE_LAUNCH_RESTARTS" -ge 3 ] || scontrol requeue "$SLURM_JOB_ID" ;;
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
