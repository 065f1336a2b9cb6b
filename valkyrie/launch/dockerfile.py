"""Dockerfile for Kubernetes. Its image contains the code of a clone and its dependencies, but no data and no runs."""

from __future__ import annotations

from valkyrie.launch.plan import shell_text
from valkyrie.launch.remote import sync_arguments

DOCKERFILE = """\
# docker build --tag IMAGE --file THIS_FILE CLONE && docker push IMAGE
FROM python:3.12-slim
RUN pip install --no-cache-dir uv
WORKDIR /valkyrie
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY experiments experiments
COPY sweeps sweeps
COPY valkyrie valkyrie
RUN uv {sync}
ENV PATH=/valkyrie/.venv/bin:$PATH
CMD ["valkyrie-train", "--help"]
"""


def dockerfile(extra: str = "tpu") -> str:
    """Return the Dockerfile. `extra` is the extra of `pyproject.toml` to install: `tpu`, `cuda`, or empty for CPUs."""
    return DOCKERFILE.format(sync=shell_text(sync_arguments(extra)))
