# --run executes these steps. If a process fails, all processes are restarted, up to 3 times
# runs=runs is probably on the local disk of each machine: checkpoints cannot be read by the other hosts. Set runs=DIR
# to a folder on a disk that all hosts mount (NFS, Filestore), or set checkpoint.folder=gs://BUCKET/DIR.
# 1. copy the last commit to ann@a and install it
git archive --format=tar.gz HEAD | ssh -o BatchMode=yes -o ServerAliveInterval=15 ann@a 'mkdir -p valkyrie && tar -xzf - -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra cuda --extra data'
# 2. copy the last commit to b and install it
git archive --format=tar.gz HEAD | ssh -o BatchMode=yes -o ServerAliveInterval=15 b 'mkdir -p valkyrie && tar -xzf - -C valkyrie && cd valkyrie && python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --no-dev --extra cuda --extra data'
# 3. train on ann@a
ssh -o BatchMode=yes -o ServerAliveInterval=15 ann@a 'cd valkyrie && JAX_COORDINATOR_ADDRESS=a:8476 JAX_PROCESS_COUNT=2 JAX_PROCESS_INDEX=0 .venv/bin/valkyrie-train model=gpt_125m mesh=2x4x1 name=mine' &
# 4. train on b
ssh -o BatchMode=yes -o ServerAliveInterval=15 b 'cd valkyrie && JAX_COORDINATOR_ADDRESS=a:8476 JAX_PROCESS_COUNT=2 JAX_PROCESS_INDEX=1 .venv/bin/valkyrie-train model=gpt_125m mesh=2x4x1 name=mine' &
wait
