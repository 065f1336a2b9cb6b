# mine on v4-64 (32 v4 chips 2x4x4, 8 hosts)
# cost of 32 v4 chips: $2,472.96 for 24 hours ($103.04 per hour) at the list price of $3.22 per chip-hour, spot price
# unknown (set spot_usd_per_hour=)
# --run executes these steps. After a preemption it deletes the slice and restarts at step 1. After a crash it restarts
# at step 6, up to 3 times
# 1. request the slice
gcloud compute tpus queued-resources create mine \
  --node-id=mine --accelerator-type=v4-64 --runtime-version=tpu-ubuntu2204-base --zone=us-central2-b
# 2. wait until it is ready
until [ "$(gcloud compute tpus queued-resources describe mine --format='value(state.state)' --zone=us-central2-b)" = ACTIVE ]; do sleep 30; done
# 3. pack the last commit
git archive --format=tar.gz --output=/tmp/mine.tar.gz HEAD
# 4. copy it to every worker
gcloud compute tpus queued-resources scp /tmp/mine.tar.gz mine: --node=all --worker=all --zone=us-central2-b
# 5. install it on every worker
gcloud compute tpus queued-resources ssh mine \
  --node=all --worker=all --zone=us-central2-b \
  --command='mkdir -p valkyrie && tar -xzf mine.tar.gz -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra tpu --extra data'
# 6. train
gcloud compute tpus queued-resources ssh mine \
  --node=all --worker=all --zone=us-central2-b \
  --command='set -o pipefail; cd valkyrie && .venv/bin/valkyrie-train +experiment=valkyrie_1b_v4_64 name=mine runs=/mnt/shared/runs 2>&1 | tee -ip -a launch.log'
# follow the log, from any machine:
#   gcloud compute tpus queued-resources ssh mine \
#     --node=0 --worker=0 --zone=us-central2-b --command='tail -n 100 -F valkyrie/launch.log'
# show its state:
#   gcloud compute tpus queued-resources describe mine --zone=us-central2-b
# list everything rented in the zone:
#   gcloud compute tpus queued-resources list --zone=us-central2-b
# delete the slice, to stop paying for it:
#   gcloud compute tpus queued-resources delete mine --force --quiet --zone=us-central2-b
