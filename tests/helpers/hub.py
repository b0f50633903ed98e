"""A Hugging Face Hub on this machine, with one data set: what `datasets` asks of the real one."""

import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REVISION = "a" * 40
_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""

Row = Mapping[str, Any]


def _parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    into = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(r) for r in rows]), into)
    return into.getvalue()


class Hub:
    """Answers for one data set; `asked` has every request, as METHOD path."""

    def __init__(self, name: str, train: Sequence[Row], test: Sequence[Row]) -> None:
        self.name = name
        self.files = {
            "README.md": _CARD.encode(),
            "main/train-00000-of-00001.parquet": _parquet(train),
            "main/test-00000-of-00001.parquet": _parquet(test),
        }
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers."""
        kind = {"Content-Type": "application/json"}
        if found := re.fullmatch(f"/datasets/{self.name}/resolve/\\w+/(.+)", path):
            return self._file(found[1])
        if re.fullmatch(f"/api/datasets/{self.name}(/revision/\\w+)?", path):
            about = {"id": self.name, "sha": REVISION, "private": False, "tags": []}
            about["siblings"] = [{"rfilename": file} for file in self.files]
            return 200, json.dumps(about).encode(), kind
        if found := re.fullmatch(f"/api/datasets/{self.name}/tree/\\w+/?(.*)", path):
            return 200, json.dumps(self._folder(found[1])).encode(), kind
        return 404, b"{}", kind

    def _file(self, name: str) -> tuple[int, bytes, dict[str, str]]:
        if name not in self.files:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        data = self.files[name]
        tag = hashlib.sha1(data).hexdigest()
        return 200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": REVISION}

    def _folder(self, name: str) -> list[dict[str, Any]]:
        at = f"{name}/" if name else ""
        here = sorted({at + f[len(at) :].split("/")[0] for f in self.files if f.startswith(at)})
        return [
            {
                "type": "file" if path in self.files else "directory",
                "path": path,
                "size": len(self.files.get(path, b"")),
                "oid": hashlib.sha1(self.files.get(path, b"")).hexdigest(),
            }
            for path in here
        ]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Answer on a free port until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            status, body, headers = hub.answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
