"""A stand-in of the Hugging Face hub on this machine: repositories that are folders, each revision a folder's name."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """Serve root/<user>/<name>/<revision>/…; `main` is the revision of a name without one. Yields the address."""

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def missing(self, kind: str) -> None:  # as the hub answers who is not logged in
            status, said = {"RepoNotFound": (401, "Invalid username or password.")}.get(kind, (404, "Invalid rev id"))
            self.answer(b"{}", status, X_Error_Code=kind, X_Error_Message=said)

        def commit(self, folder: Path) -> str:
            return hashlib.sha1(str(folder.relative_to(root)).encode()).hexdigest()

        def revision(self, user: str, name: str, asked: str) -> Path | None:
            folders = (root / user / name).glob("*")
            return next((folder for folder in folders if asked in (folder.name, self.commit(folder))), None)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            match unquote(self.path).split("?")[0].strip("/").split("/"):
                case ["api", "models", user, name, *rest]:
                    if not (root / user / name).is_dir():
                        return self.missing("RepoNotFound")
                    folder = self.revision(user, name, rest[1] if rest[:1] in (["revision"], ["tree"]) else "main")
                    if folder is None:
                        return self.missing("RevisionNotFound")
                    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                    names = [str(path.relative_to(folder)) for path in files]
                    if rest[:1] == ["tree"]:
                        tree = [
                            {"type": "file", "path": name, "size": path.stat().st_size, "oid": digest(path)}
                            for name, path in zip(names, files)
                        ]
                        return self.answer(json.dumps(tree).encode(), Content_Type="application/json")
                    told = {"id": f"{user}/{name}", "sha": self.commit(folder), "private": False, "tags": []}
                    told["siblings"] = [{"rfilename": name} for name in names]
                    return self.answer(json.dumps(told).encode(), Content_Type="application/json")
                case [user, name, "resolve", asked, *path]:
                    file = self.revision(user, name, asked) / "/".join(path)
                    commit = self.commit(file.parents[len(path) - 1])
                    return self.answer(file.read_bytes(), ETag=f'"{digest(file)}"', X_Repo_Commit=commit)
            self.answer(b"{}")

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            match unquote(self.path).split("?")[0].strip("/").split("/"):
                case ["api", "repos", "create"]:
                    asked = json.loads(content)
                    full = f"{asked.get('organization') or 'me'}/{asked['name']}"
                    (root / full / "main").mkdir(parents=True, exist_ok=True)
                    url = f"http://{self.headers['Host']}/{full}"
                    return self.answer(json.dumps({"url": url, "id": full}).encode())
                case ["api", "models", user, name, "preupload", _]:
                    files = [
                        {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for file in json.loads(content)["files"]
                    ]
                    return self.answer(json.dumps({"files": files}).encode())
                case ["api", "models", user, name, "commit", _]:
                    for line in map(json.loads, content.splitlines()):
                        if line["key"] == "file":
                            path = root / user / name / "main" / line["value"]["path"]
                            path.parent.mkdir(parents=True, exist_ok=True)
                            path.write_bytes(base64.b64decode(line["value"]["content"]))
                    told = {"commitUrl": f"http://{self.headers['Host']}/{user}/{name}/commit/1", "commitOid": "1" * 40}
                    return self.answer(json.dumps({**told, "pullRequestUrl": None}).encode())
            self.answer(b"{}")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
