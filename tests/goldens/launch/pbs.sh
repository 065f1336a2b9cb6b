# 1. write the job
cat > job.pbs <<'END'
#PBS -N mine
#PBS -q large
#PBS -l select=2
mpiexec --ppn 1 valkyrie-train model=gpt_tiny mesh=2x1x1 name=mine
END
# 2. submit the job
qsub job.pbs
# list all jobs:
#   qstat
