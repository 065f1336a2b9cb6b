# mine on v5e-8 (8 v5e chips 2x4, 1 host)
# cost of 8 v5e chips: spot price not known here (spot_usd_per_hour= of a chip sets it); $9.60 an hour at the list price
# of $1.20 a chip
# --run runs this; after a preemption it deletes the slice and begins at 1 again, after a crash at 6, up to 3 times
# 1. ask for the slice
gcloud compute tpus queued-resources create mine \
  --node-id=mine --accelerator-type=v5litepod-8 --runtime-version=v2-alpha-tpuv5-lite --spot --zone=us-west4-a
# 2. wait until it is there
until [ "$(gcloud compute tpus queued-resources describe mine --format='value(state.state)' --zone=us-west4-a)" = ACTIVE ]; do sleep 30; done
# 3. pack the last commit
git archive --format=tar.gz --output=/tmp/mine.tar.gz HEAD
# 4. copy it to every worker
gcloud compute tpus queued-resources scp /tmp/mine.tar.gz mine: --node=all --worker=all --zone=us-west4-a
# 5. install it there
gcloud compute tpus queued-resources ssh mine \
  --node=all --worker=all --zone=us-west4-a \
  --command='mkdir -p valkyrie && tar -xzf mine.tar.gz -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra tpu'
# 6. train
gcloud compute tpus queued-resources ssh mine \
  --node=all --worker=all --zone=us-west4-a \
  --command='set -o pipefail; cd valkyrie && .venv/bin/valkyrie-train model=gpt_125m mesh=2x4x1 batch=32 name=mine runs=/mnt/shared/runs 2>&1 | tee -ip -a launch.log'
# what it prints, from any machine:
#   gcloud compute tpus queued-resources ssh mine \
#     --node=0 --worker=0 --zone=us-west4-a --command='tail -n 100 -F valkyrie/launch.log'
# its state:
#   gcloud compute tpus queued-resources describe mine --zone=us-west4-a
# all that is rented in the zone:
#   gcloud compute tpus queued-resources list --zone=us-west4-a
# give it back: until then it costs:
#   gcloud compute tpus queued-resources delete mine --force --quiet --zone=us-west4-a
