# mine on h100-16 (16 h100 chips, 2 hosts)
# cost of 16 h100 chips: $36.64 per hour at the list price of $2.29 per chip-hour, spot price unknown (set
# spot_usd_per_hour=)
# 1. write the task
cat > mine.sky.yaml <<'END'
name: mine
workdir: .
num_nodes: 2
resources:
  accelerators: H100:8
  job_recovery:
    max_restarts_on_errors: 3
    recover_on_exit_codes:
      - 75
setup: |
  python3 -m pip install --quiet uv && python3 -m uv sync --quiet --no-dev --extra cuda --extra data
run: |
  export JAX_COORDINATOR_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n1):8476"
  export JAX_PROCESS_COUNT="$SKYPILOT_NUM_NODES" JAX_PROCESS_INDEX="$SKYPILOT_NODE_RANK"
  .venv/bin/valkyrie-train model=gpt_1b mesh=16x1x1 name=mine runs=/mnt/shared/runs
END
# 2. submit the task
sky jobs launch mine.sky.yaml
# list all jobs and their states:
#   sky jobs queue
# follow the log:
#   sky jobs logs -n mine
# stop the job:
#   sky jobs cancel -n mine
