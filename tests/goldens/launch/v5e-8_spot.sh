# mine on v5e-8 (8 v5e chips 2x4, 1 host)
# cost of 8 v5e chips: spot price unknown (set spot_usd_per_hour=), $9.60 per hour at the list price of $1.20 per
# chip-hour
# --run executes these steps. After a preemption it deletes the slice and restarts at step 1. After a crash it restarts
# at step 6, up to 3 times
# 1. request the slice
gcloud compute tpus queued-resources create mine \
  --node-id=mine --accelerator-type=v5litepod-8 --runtime-version=v2-alpha-tpuv5-lite --spot --zone=us-west4-a
# 2. wait until it is ready
until [ "$(gcloud compute tpus queued-resources describe mine --format='value(state.state)' --zone=us-west4-a)" = ACTIVE ]; do sleep 30; done
# 3. pack the last commit
git archive --format=tar.gz --output=/tmp/mine.tar.gz HEAD
# 4. copy it to every worker
gcloud compute tpus queued-resources scp /tmp/mine.tar.gz mine: --node=all --worker=all --zone=us-west4-a
# 5. install it on every worker
gcloud compute tpus queued-resources ssh mine \
  --node=all --worker=all --zone=us-west4-a \
  --command='mkdir -p valkyrie && tar -xzf mine.tar.gz -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra tpu --extra data'
# 6. train
gcloud compute tpus queued-resources ssh mine \
  --node=all --worker=all --zone=us-west4-a \
  --command='set -o pipefail; cd valkyrie && .venv/bin/valkyrie-train model=gpt_125m mesh=2x4x1 batch=32 name=mine runs=/mnt/shared/runs 2>&1 | tee -ip -a launch.log'
# follow the log, from any machine:
#   gcloud compute tpus queued-resources ssh mine \
#     --node=0 --worker=0 --zone=us-west4-a --command='tail -n 100 -F valkyrie/launch.log'
# show its state:
#   gcloud compute tpus queued-resources describe mine --zone=us-west4-a
# list everything rented in the zone:
#   gcloud compute tpus queued-resources list --zone=us-west4-a
# delete the slice, to stop paying for it:
#   gcloud compute tpus queued-resources delete mine --force --quiet --zone=us-west4-a
