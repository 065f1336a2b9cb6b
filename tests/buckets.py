"""Fixture with an emulator of Google Cloud Storage on the loopback interface."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

SERVER_PROGRAM = """
import sys, threading
from http import HTTPStatus
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

download, insert, one_write = objects.download, objects.insert, threading.Lock()

def generation(storage, bucket, name):
    try:
        return storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return "0"

def download_with_generation(request, response, storage, *args, **kwargs):
    response["x-goog-generation"] = generation(storage, request.params["bucket_name"], request.params["object_id"])
    download(request, response, storage, *args, **kwargs)

def insert_if_it_matches(request, response, storage, *args, **kwargs):
    wanted = request.query.get("ifGenerationMatch")
    with one_write:
        name = request.query.get("name", [""])[0]
        if wanted and wanted[0] != generation(storage, request.params["bucket_name"], name):
            response.status = HTTPStatus.PRECONDITION_FAILED
            response.json({"error": {"code": 412}})
        else:
            insert(request, response, storage, *args, **kwargs)

objects.download, objects.insert = download_with_generation, insert_if_it_matches
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="valkyrie")
server.start()
print("ready", flush=True)
sys.stdin.read()
"""
"""Program that starts the emulator, with two additions that TensorStore needs: generations and conditional writes."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a folder in an emulated bucket. gcsfs and TensorStore are configured to use the emulator."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER_PROGRAM, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    environment = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield "gs://valkyrie/runs"
    server.kill()
    server.communicate()
