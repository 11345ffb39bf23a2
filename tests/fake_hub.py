"""A stand-in for the Hub: repositories in memory behind its HTTP interface, as far as its own client asks for it.

with fake_hub() as hub: a process with `hub.environment` talks to it, and `hub.commits` holds what was uploaded.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import yaml

TOKEN = "hf_of_the_stand_in"


@dataclass
class FakeHub:
    """What the stand-in holds.

    Args:
        commits: Files by path, by the commit's id, by repository.
        branches: A commit's id by the name of a branch, by repository.
        blobs: Content of large files by SHA-256.
        private: Repositories that want the token.
        downloaded: (repository, revision, file) in the order of asking.
    """

    url: str = ""
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    downloaded: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the Hub's client asks here; large files go by LFS, as Xet is another interface."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}

    def commit_of(self, repository: str, revision: str) -> str | None:
        """The id of a commit by itself or by the name of a branch."""
        if revision in self.commits.get(repository, {}):
            return revision
        return self.branches.get(repository, {}).get(revision)

    def commit(self, repository: str, branch: str, changes: dict[str, bytes]) -> str:
        """A new commit on the branch; its id."""
        before = self.commits[repository][self.branches[repository][branch]]
        files = {**before, **changes}
        listed = json.dumps([len(self.commits[repository]), branch, sorted(files)]).encode()
        number = hashlib.sha1(listed).hexdigest()
        self.commits[repository][number] = files
        self.branches[repository][branch] = number
        return number


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, content: Any, status: int = 200, head: bool = False, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str, head: bool = False) -> None:
        self.answer({"error": message}, status, head, X_Error_Code=code, X_Error_Message=message)

    def is_let_in(self, repository: str, head: bool = False) -> bool:
        """Whether the repository is there for this client."""
        if repository not in self.hub.commits or (repository in self.hub.private and not self.has_token()):
            self.refuse(401, "RepoNotFound", "Repository not found", head)
            return False
        return True

    def has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def do_POST(self) -> None:
        body, hub = self.read(), self.hub
        if not self.has_token():
            self.refuse(401, "", "Invalid username or password.")
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            repository = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            if repository in hub.commits:
                self.answer({"error": "You already created this model repo", "url": f"{hub.url}/{repository}"}, 409)
                return
            hub.commits[repository] = {"0" * 40: {}}
            hub.branches[repository] = {"main": "0" * 40}
            if asked.get("private") or asked.get("visibility") == "private":
                hub.private.add(repository)
            self.answer({"url": f"{hub.url}/{repository}", "name": repository, "id": repository})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": card_errors(json.loads(body)["content"]), "warnings": []})
        elif found := re.fullmatch(r"/api/models/(.+)/branch/(.+)", self.path):
            repository, branch = found[1], unquote(found[2])
            if branch in hub.branches[repository]:
                self.refuse(409, "", f"Reference already exists: refs/heads/{branch}")
                return
            hub.branches[repository][branch] = hub.branches[repository]["main"]
            self.answer({})
        elif re.fullmatch(r"/api/models/(.+)/preupload/(.+)", self.path):
            files = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": mode_of(one["path"]), "shouldIgnore": False} for one in files]
            self.answer({"files": modes})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            to = {one["oid"]: {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}} for one in wanted}
            self.answer({"transfer": "basic", "objects": [{**one, "actions": to[one["oid"]]} for one in wanted]})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/(.+)", self.path):
            repository, branch = found[1], unquote(found[2])
            if branch not in hub.branches.get(repository, {}):
                self.refuse(404, "RevisionNotFound", f"Invalid rev id: {branch}")
                return
            number = hub.commit(repository, branch, self.changes(body))
            where = f"{hub.url}/{repository}/commit/{number}"
            self.answer({"success": True, "commitOid": number, "commitUrl": where, "hookOutput": ""})
        else:
            self.refuse(404, "EntryNotFound", self.path)

    def changes(self, body: bytes) -> dict[str, bytes]:
        """Files by path, from the lines of a commit."""
        out: dict[str, bytes] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                out[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                out[value["path"]] = self.hub.blobs[value["oid"]]
            else:
                assert line["key"] == "header", line["key"]
        return out

    def do_PUT(self) -> None:
        body = self.read()
        self.hub.blobs[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def do_HEAD(self) -> None:
        self.resolve(head=True)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/(.+?)/(revision|tree)/([^/]+)(/.+)?", path):
            repository, revision = found[1], unquote(found[3])
            if not self.is_let_in(repository):
                return
            commit = self.hub.commit_of(repository, revision)
            if commit is None:
                self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
                return
            files = self.hub.commits[repository][commit]
            if found[4] is not None:  # no repository here has a folder
                self.refuse(404, "EntryNotFound", f"{found[4]} does not exist")
            elif found[2] == "revision":
                listed = [{"rfilename": name} for name in files]
                self.answer({"id": repository, "sha": commit, "siblings": listed, "tags": [], "private": False})
            else:
                listed = [
                    {"type": "file", "path": name, "size": len(files[name]), "oid": tag(files[name])} for name in files
                ]
                self.answer(listed)
        else:
            self.resolve(head=False)

    def resolve(self, head: bool) -> None:
        """A file of a revision."""
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path.partition("?")[0])
        if found is None:
            self.refuse(404, "EntryNotFound", self.path, head)
            return
        repository, revision, name = found[1], unquote(found[2]), unquote(found[3])
        if not self.is_let_in(repository, head):
            return
        commit = self.hub.commit_of(repository, revision)
        if commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}", head)
            return
        content = self.hub.commits[repository][commit].get(name)
        if content is None:
            self.refuse(404, "EntryNotFound", f"{name} does not exist", head)
            return
        if not head:
            self.hub.downloaded.append((repository, revision, name))
        self.answer(content, head=head, ETag=f'"{tag(content)}"', X_Repo_Commit=commit)


def tag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def card_errors(card: str) -> list[dict[str, str]]:
    """What the Hub would refuse of a card's first lines."""
    about = yaml.safe_load(card.split("---")[1])
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", about.get("base_model", "a/b")):
        return [{"message": '"base_model" is not valid. Use a model id from https://hf.co/models.'}]
    return []


def mode_of(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A Hub at an address of this machine, until the end of the block."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
