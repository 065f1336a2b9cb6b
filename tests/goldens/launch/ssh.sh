# --run runs this, ends all when one fails and starts all again, up to 3 times
# runs=runs lies on each machine's own disk: checkpoints are not seen by the other hosts. Write runs=DIR with a folder
# of a disk that all hosts mount (NFS, Filestore), or checkpoint.folder=gs://BUCKET/DIR.
# 1. copy the last commit to ann@a and install it
git archive --format=tar.gz HEAD | ssh -o BatchMode=yes -o ServerAliveInterval=15 ann@a 'mkdir -p valkyrie && tar -xzf - -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra cuda'
# 2. copy the last commit to b and install it
git archive --format=tar.gz HEAD | ssh -o BatchMode=yes -o ServerAliveInterval=15 b 'mkdir -p valkyrie && tar -xzf - -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra cuda'
# 3. train on ann@a
ssh -o BatchMode=yes -o ServerAliveInterval=15 ann@a 'cd valkyrie && JAX_COORDINATOR_ADDRESS=a:8476 JAX_PROCESS_COUNT=2 JAX_PROCESS_INDEX=0 .venv/bin/valkyrie-train model=gpt_125m mesh=2x4x1 name=mine' &
# 4. train on b
ssh -o BatchMode=yes -o ServerAliveInterval=15 b 'cd valkyrie && JAX_COORDINATOR_ADDRESS=a:8476 JAX_PROCESS_COUNT=2 JAX_PROCESS_INDEX=1 .venv/bin/valkyrie-train model=gpt_125m mesh=2x4x1 name=mine' &
wait
