# mine on v6e-4 (4 v6e chips 2x2, 1 host)
# cost of 4 v6e chips: spot price unknown (set spot_usd_per_hour=), $10.80 per hour at the list price of $2.70 per
# chip-hour
# --run executes these steps. After a preemption it deletes the slice and restarts at step 1. After a crash it restarts
# at step 6, up to 3 times
# 1. request the slice
gcloud compute tpus tpu-vm create mine --accelerator-type=v6e-4 --version=v2-alpha-tpuv6e --spot --zone=us-east5-a
# 2. wait until it is ready
until [ "$(gcloud compute tpus tpu-vm describe mine --format='value(state)' --zone=us-east5-a)" = READY ]; do sleep 30; done
# 3. pack the last commit
git archive --format=tar.gz --output=/tmp/mine.tar.gz HEAD
# 4. copy it to every worker
gcloud compute tpus tpu-vm scp /tmp/mine.tar.gz mine: --worker=all --zone=us-east5-a
# 5. install it on every worker
gcloud compute tpus tpu-vm ssh mine \
  --worker=all --zone=us-east5-a \
  --command='mkdir -p valkyrie && tar -xzf mine.tar.gz -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra tpu --extra data'
# 6. train
gcloud compute tpus tpu-vm ssh mine \
  --worker=all --zone=us-east5-a \
  --command='set -o pipefail; cd valkyrie && .venv/bin/valkyrie-train model=gpt_125m mesh=2x2x1 batch=32 name=mine runs=/mnt/shared/runs 2>&1 | tee -ip -a launch.log'
# follow the log, from any machine:
#   gcloud compute tpus tpu-vm ssh mine --worker=0 --zone=us-east5-a --command='tail -n 100 -F valkyrie/launch.log'
# show its state:
#   gcloud compute tpus tpu-vm describe mine --zone=us-east5-a
# list everything rented in the zone:
#   gcloud compute tpus tpu-vm list --zone=us-east5-a
# delete the slice, to stop paying for it:
#   gcloud compute tpus tpu-vm delete mine --quiet --zone=us-east5-a
