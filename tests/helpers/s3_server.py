"""A real S3 server over HTTP (moto), and the faults that a network or a service can have.

    server = S3Server()                             # `python -m helpers.s3_server PORT BUCKET DIRECTORY` runs one
    server.fault = lambda request: "slow down" if request.method == "PUT" else ""

A fault is the name of one in FAULTS, or empty. Every request is recorded before it is answered.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

FAULTS = ("error", "slow down", "no credentials", "torn", "lost answer", "slow")
"""500; 503 SlowDown; 403; half of the request arrives; the request is carried out but not answered; half a second."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key-of-the-tests", "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests"}
_ANSWERS = {
    "error": ("500 Internal Server Error", "InternalError"),
    "slow down": ("503 Slow Down", "SlowDown"),
    "no credentials": ("403 Forbidden", "ExpiredToken"),
}


class Request(NamedTuple):
    method: str
    path: str
    """Path of the URL: /bucket/key."""
    query: str
    size: int
    """Bytes of the body."""


class S3Server:
    """The server, in threads of this process. Its data is in memory."""

    def __init__(self, address: str = "127.0.0.1", port: int = 0, record: Path | None = None) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, type: str, message: str, *args: Any) -> None: ...

        self.requests: list[Request] = []
        self.fault: Callable[[Request], str] = lambda request: ""
        self.record = record
        """Directory in which every object is a file, for tests that cannot reach the server."""
        self._recording = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(address, port, self, threaded=True, request_handler=Quiet)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{address}:{self._server.server_port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            **CREDENTIALS,
        }
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        size = int(environ.get("CONTENT_LENGTH") or 0)
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], size)
        self.requests.append(request)
        fault = self.fault(request)
        if fault in _ANSWERS:
            environ["wsgi.input"].read(size)
            status, code = _ANSWERS[fault]
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if fault == "slow":
            time.sleep(0.5)
        if fault == "torn":
            environ["wsgi.input"].read(size // 2)
            self._hang_up(environ)
        answer = self._moto(environ, start_response if fault != "lost answer" else lambda *_: lambda _: None)
        if self.record is not None and request.method in ("PUT", "DELETE", "POST"):
            answer = list(answer)
            bucket, _, key = request.path.strip("/").partition("/")
            with self._recording:  # another thread may change the same object
                if key:
                    self._write_object(self.record / bucket / key, _objects(bucket).get(key))
                elif request.method == "POST":  # deletes many objects
                    for path in [path for path in (self.record / bucket).rglob("*") if path.is_file()]:
                        if path.relative_to(self.record / bucket).as_posix() not in _objects(bucket):
                            path.unlink()
        if fault == "lost answer":
            list(answer)
            self._hang_up(environ)
        return answer

    @staticmethod
    def _write_object(path: Path, found: Any) -> None:
        if found is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(found.value)
            partial.rename(path)

    def _hang_up(self, environ: dict[str, Any]) -> None:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError


def _objects(bucket: str) -> Any:
    """Return the objects of a bucket by key."""
    from moto.backends import get_backend

    return get_backend("s3")["123456789012"]["aws"].buckets[bucket].keys


def make_bucket(environment: dict[str, str], name: str) -> str:
    """Create a bucket. Return its URL."""
    import boto3

    client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"])
    client.create_bucket(Bucket=name)
    return f"s3://{name}"


def fault_of_file(file: Path) -> Callable[[Request], str]:
    """Return a fault that another process sets, by writing its name to a file."""

    def fault(request: Request) -> str:
        try:
            return file.read_text()
        except OSError:
            return ""

    return fault


if __name__ == "__main__":
    server = S3Server("0.0.0.0", int(sys.argv[1]), Path(sys.argv[3]))
    os.environ.update(server.environment)
    print(make_bucket(server.environment, sys.argv[2]), server.environment["AWS_ENDPOINT_URL"], flush=True)
    server.fault = fault_of_file(Path(sys.argv[3]).with_suffix(".fault"))
    signal.pause()
