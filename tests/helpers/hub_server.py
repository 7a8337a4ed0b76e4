"""A stand-in for the Hugging Face Hub on the loopback interface: the part of its HTTP API that push and pull use."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "s" * 34
LFS_BYTES = 2**16
"""Files of this size and safetensors are stored as large files, others in git."""


class Hub:
    """Repositories: commits with their files, and objects of large files."""

    def __init__(self):
        self.heads, self.commits, self.private, self.objects = {}, {}, set(), {}
        self.uploaded, self.served, self.requests = [], [], []
        """Large files that were uploaded, files that were downloaded with their first byte, and all requests."""
        self.refuse_uploads_after = None
        """Number of large files after which uploads fail."""
        self.cut_after = {}
        """Number of bytes after which the download of a file is cut off, by path. Once each."""
        self.listed = {}
        """Changes of what is listed about a file, by path."""
        self.appended = {}
        """Bytes that are served after the content of a file, by path."""
        self.stalled, self.released = threading.Event(), threading.Event()
        self.stall_after = {}
        """Number of bytes after which the download of a file stalls until `released`, by path. Once each."""

    def commit(self, repo, files):
        sha = hashlib.sha1(f"{repo}{len(self.commits)}".encode()).hexdigest()
        self.commits[repo, sha] = dict(files)
        self.heads[repo] = sha
        return sha

    def files(self, repo):
        return self.commits[repo, self.heads[repo]]


def is_large(path, size):
    return path.endswith(".safetensors") or size >= LFS_BYTES


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_): ...

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def do_POST(self):
        self.answer()

    def do_PUT(self):
        self.answer()

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        for pattern, method in ROUTES:
            if match := re.fullmatch(pattern, path):
                return getattr(self, method)(body, *match.groups())
        return self.reply(404, {"error": f"no route {path}"})

    def reply(self, status, values):
        content = json.dumps(values).encode()
        self.send_response(status)
        if status == 404 and "error" in values:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    @property
    def authorized(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def visible(self, repo):
        if repo in self.hub.heads and (repo not in self.hub.private or self.authorized):
            return True
        self.reply(404, {"error": "Repository not found"})
        return False

    def writable(self, repo):
        if not self.authorized:
            self.reply(401, {"error": "Invalid username or password."})
            return False
        return self.visible(repo)

    def create(self, body):
        values = json.loads(body)
        repo = f"{values['organization']}/{values['name']}"
        if not self.authorized:
            return self.reply(401, {"error": "Invalid username or password."})
        url = f"http://{self.headers['Host']}/{repo}"
        if repo in self.hub.heads:
            return self.reply(409, {"url": url, "error": "You already created this model repo"})
        if values.get("visibility") == "private" or values.get("private"):
            self.hub.private.add(repo)
        self.hub.commit(repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
        return self.reply(200, {"url": url, "name": repo})

    def validate(self, body):
        assert json.loads(body)["content"].startswith("---\n")
        self.reply(200, {"errors": [], "warnings": []})

    def info(self, body, repo, revision=None):
        if self.visible(repo):
            sha = self.hub.heads[repo] if revision in (None, "main") else revision
            self.reply(200, {"id": repo, "modelId": repo, "sha": sha, "siblings": [], "tags": [], "private": False})

    def tree(self, body, repo, revision):
        if not self.visible(repo):
            return
        revision = self.hub.heads[repo] if revision == "main" else revision
        entries = []
        for path, content in self.hub.commits[repo, revision].items():
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
            if is_large(path, len(content)):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
            entries.append(entry | self.hub.listed.get(path, {}))
        self.reply(200, entries)

    def preupload(self, body, repo, revision):
        if not self.writable(repo):
            return
        known = self.hub.files(repo)
        answer = []
        for file in json.loads(body)["files"]:
            large = is_large(file["path"], file["size"])
            content = known.get(file["path"])
            oid = None if content is None else hashlib.sha256(content).hexdigest() if large else git_hash(content)
            mode = "lfs" if large else "regular"
            answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.reply(200, {"files": answer})

    def batch(self, body, repo):
        if not self.writable(repo):
            return
        objects = []
        for wanted in json.loads(body)["objects"]:
            href = f"http://{self.headers['Host']}/lfs/{wanted['oid']}"
            stored = wanted["oid"] in self.hub.objects
            objects.append(wanted | ({} if stored else {"actions": {"upload": {"href": href, "header": {}}}}))
        self.reply(200, {"transfer": "basic", "objects": objects})

    def upload(self, body, oid):
        limit = self.hub.refuse_uploads_after
        if limit is not None and len(self.hub.uploaded) >= limit:
            return self.reply(400, {"error": "the upload was cut off"})
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.hub.uploaded.append(oid)
        return self.reply(200, {})

    def receive_commit(self, body, repo, revision):
        if not self.writable(repo):
            return
        lines = [json.loads(line) for line in body.splitlines()]
        if lines[0]["value"].get("parentCommit", self.hub.heads[repo]) != self.hub.heads[repo]:
            self.reply(412, {"error": "a newer commit exists"})
            return
        files = dict(self.hub.files(repo))
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                del files[value["path"]]
        sha = self.hub.commit(repo, files)
        self.reply(
            200, {"success": True, "commitOid": sha, "commitUrl": f"http://{self.headers['Host']}/{repo}/commit/{sha}"}
        )

    def resolve(self, body, repo, revision, path):
        if not self.visible(repo):
            return
        content = self.hub.commits[repo, revision][path] + self.hub.appended.get(path, b"")
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        self.hub.served.append((path, start))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if (first := self.hub.stall_after.pop(path, None)) is not None:
            self.wfile.write(content[start:first])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.released.wait(600)
            start = first
        stop = self.hub.cut_after.pop(path, None)
        self.wfile.write(content[start:stop])
        if stop is not None:
            self.close_connection = True


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (r"/api/repos/create", "create"),
    (r"/api/validate-yaml", "validate"),
    (rf"/api/models/{REPO}", "info"),
    (rf"/api/models/{REPO}/revision/(\w+)", "info"),
    (rf"/api/models/{REPO}/tree/(\w+)", "tree"),
    (rf"/api/models/{REPO}/preupload/(\w+)", "preupload"),
    (rf"/api/models/{REPO}/commit/(\w+)", "receive_commit"),
    (rf"/{REPO}\.git/info/lfs/objects/batch", "batch"),
    (r"/lfs/(\w+)", "upload"),
    (rf"/{REPO}/resolve/(\w+)/(.+)", "resolve"),
]


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Ignore a client that closed its connection."""


@contextmanager
def serve():
    """Yield a hub and its address."""
    hub = Hub()
    server = Server(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
