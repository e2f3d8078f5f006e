"""An endpoint on the loopback that answers what it is told to: a judge and a reward model whose answers are
known, for audits and tests.

`/chat/completions` replies with the last message. `/classify` answers the text itself where that is JSON,
else `1.0` where "good" is in it and `0.0` where it is not, in vLLM's form. `fail` makes it answer errors
first.
"""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


class EchoEndpoint:
    """What the server is told, and what it was asked."""

    def __init__(self, port: int):
        self.address = f"http://127.0.0.1:{port}"
        self.asked: list[tuple[str, dict[str, Any], str]] = []  # path, body, Authorization
        self.fail: list[int] = []  # status codes that the next requests get
        self.busy = self.most_busy = 0  # requests at the same time
        self.wait = threading.Event()
        self.wait.set()

    def answer(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the body of an answer."""
        if path.endswith("/chat/completions"):
            content = body["messages"][-1]["content"]
            return json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        text = body.get("input", body.get("text"))
        try:
            json.loads(text)
            return text.encode()
        except ValueError:
            return json.dumps({"data": [{"probs": [float("good" in text)]}]}).encode()


@contextlib.contextmanager
def echo_endpoint() -> Iterator[EchoEndpoint]:
    """Run the server while the context lasts."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.asked.append((self.path, body, self.headers.get("Authorization", "")))
            endpoint.busy += 1
            endpoint.most_busy = max(endpoint.most_busy, endpoint.busy)
            endpoint.wait.wait(30)
            code = endpoint.fail.pop(0) if endpoint.fail else 200
            data = endpoint.answer(self.path, body) if code == 200 else b"come again"
            endpoint.busy -= 1
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = EchoEndpoint(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
