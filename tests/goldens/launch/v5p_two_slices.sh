# mine on 2 slices of v5p-128 (64 v5p chips 4x4x4, 16 hosts)
# cost of 128 v5p chips: $537.60 per hour at the list price of $4.20 per chip-hour, spot price unknown (set
# spot_usd_per_hour=)
# --run executes these steps. After a preemption it deletes the slice and restarts at step 1. After a crash it restarts
# at step 6, up to 3 times
# 1. request the slice
gcloud compute tpus queued-resources create mine \
  --node-count=2 --node-prefix=mine --accelerator-type=v5p-128 --runtime-version=v2-alpha-tpuv5 --zone=us-east5-a
# 2. wait until it is ready
until [ "$(gcloud compute tpus queued-resources describe mine --format='value(state.state)' --zone=us-east5-a)" = ACTIVE ]; do sleep 30; done
# 3. pack the last commit
git archive --format=tar.gz --output=/tmp/mine.tar.gz HEAD
# 4. copy it to every worker
gcloud compute tpus queued-resources scp /tmp/mine.tar.gz mine: --node=all --worker=all --zone=us-east5-a
# 5. install it on every worker
gcloud compute tpus queued-resources ssh mine \
  --node=all --worker=all --zone=us-east5-a \
  --command='mkdir -p valkyrie && tar -xzf mine.tar.gz -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra tpu --extra data'
# 6. train
gcloud compute tpus queued-resources ssh mine \
  --node=all --worker=all --zone=us-east5-a \
  --command='set -o pipefail; cd valkyrie && .venv/bin/valkyrie-train model=llama_8b mesh=2s4x4x4 batch=256 name=mine runs=/mnt/shared/runs 2>&1 | tee -ip -a launch.log'
# follow the log, from any machine:
#   gcloud compute tpus queued-resources ssh mine \
#     --node=0 --worker=0 --zone=us-east5-a --command='tail -n 100 -F valkyrie/launch.log'
# show its state:
#   gcloud compute tpus queued-resources describe mine --zone=us-east5-a
# list everything rented in the zone:
#   gcloud compute tpus queued-resources list --zone=us-east5-a
# delete the slice, to stop paying for it:
#   gcloud compute tpus queued-resources delete mine --force --quiet --zone=us-east5-a
