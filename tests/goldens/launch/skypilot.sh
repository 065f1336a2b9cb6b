# mine on v5e-8 (8 v5e chips 2x4, 1 host)
# cost of 8 v5e chips: spot price unknown (set spot_usd_per_hour=), $9.60 per hour at the list price of $1.20 per
# chip-hour
# 1. write the task
cat > mine.sky.yaml <<'END'
name: mine
workdir: .
resources:
  infra: gcp/us-west4/us-west4-a
  accelerators: tpu-v5litepod-8
  accelerator_args:
    runtime_version: v2-alpha-tpuv5-lite
  use_spot: true
  job_recovery:
    max_restarts_on_errors: 3
    recover_on_exit_codes:
      - 75
setup: |
  python3 -m pip install --quiet uv && python3 -m uv sync --quiet --no-dev --extra tpu --extra data
run: |
  .venv/bin/valkyrie-train model=gpt_125m mesh=2x4x1 name=mine runs=/mnt/shared/runs
END
# 2. submit the task
sky jobs launch mine.sky.yaml
# list all jobs and their states:
#   sky jobs queue
# follow the log:
#   sky jobs logs -n mine
# stop the job:
#   sky jobs cancel -n mine
