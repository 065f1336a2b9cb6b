# mine on v6e-4 (4 v6e chips 2x2, 1 host)
# cost of 4 v6e chips: spot price not known here (spot_usd_per_hour= of a chip sets it); $10.80 an hour at the list
# price of $2.70 a chip
# --run runs this; after a preemption it deletes the slice and begins at 1 again, after a crash at 6, up to 3 times
# 1. ask for the slice
gcloud compute tpus tpu-vm create mine --accelerator-type=v6e-4 --version=v2-alpha-tpuv6e --spot --zone=us-east5-a
# 2. wait until it is there
until [ "$(gcloud compute tpus tpu-vm describe mine --format='value(state)' --zone=us-east5-a)" = READY ]; do sleep 30; done
# 3. pack the last commit
git archive --format=tar.gz --output=/tmp/mine.tar.gz HEAD
# 4. copy it to every worker
gcloud compute tpus tpu-vm scp /tmp/mine.tar.gz mine: --worker=all --zone=us-east5-a
# 5. install it there
gcloud compute tpus tpu-vm ssh mine \
  --worker=all --zone=us-east5-a \
  --command='mkdir -p valkyrie && tar -xzf mine.tar.gz -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra tpu'
# 6. train
gcloud compute tpus tpu-vm ssh mine \
  --worker=all --zone=us-east5-a \
  --command='set -o pipefail; cd valkyrie && .venv/bin/valkyrie-train model=gpt_125m mesh=2x2x1 batch=32 name=mine runs=/mnt/shared/runs 2>&1 | tee -ip -a launch.log'
# what it prints, from any machine:
#   gcloud compute tpus tpu-vm ssh mine --worker=0 --zone=us-east5-a --command='tail -n 100 -F valkyrie/launch.log'
# its state:
#   gcloud compute tpus tpu-vm describe mine --zone=us-east5-a
# all that is rented in the zone:
#   gcloud compute tpus tpu-vm list --zone=us-east5-a
# give it back: until then it costs:
#   gcloud compute tpus tpu-vm delete mine --quiet --zone=us-east5-a
