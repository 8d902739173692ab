"""An S3 endpoint on this machine: moto, with buckets that live as long as the process.

As a program, `python tests/support/s3_server.py ADDRESS PORT`, it makes the bucket "bucket", prints
the environment with which islands reach it as one line of JSON, and serves until it is killed.
"""

import contextlib
import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

BUCKET = "bucket"
# What the environment holds of an island that may write; moto accepts any of them.
KEY, SECRET = "AKIAISLANDSISLANDS00", "islands/secret/of/nobody"


def environment(url: str) -> dict[str, str]:
    """Environment variables with which obstore reaches the endpoint."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "*",
    }


class _OneByOne:
    """A WSGI application that answers one request at a time, each when all of it has arrived.

    moto looks whether an object exists and then writes it: of two threads both could win.
    """

    def __init__(self, application: Callable[..., Any]) -> None:
        self._application, self._lock = application, threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            found = self._application({**environ, "wsgi.input": io.BytesIO(body)}, start_response)
            return [b"".join(found)]


def server(address: str = "127.0.0.1", port: int = 0) -> Any:
    """A server of moto at an address; 0 takes a free port."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    return make_server(address, port, _OneByOne(application), threaded=True)


@contextlib.contextmanager
def served(address: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve within the block, and yield the endpoint's URL; buckets stay for the next block."""
    one = server(address, port)
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://{address}:{one.server_port}"
    finally:
        one.shutdown()
        thread.join()
        one.server_close()


def make_bucket(url: str, bucket: str) -> None:
    """Make a bucket; nothing happens if it is there."""
    import boto3
    from botocore.exceptions import ClientError

    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )
    with contextlib.suppress(ClientError):  # it is there
        client.create_bucket(Bucket=bucket)


if __name__ == "__main__":
    with served(sys.argv[1], int(sys.argv[2])) as _url:
        make_bucket(_url, BUCKET)
        print(json.dumps(environment(_url)), flush=True)
        threading.Event().wait()
