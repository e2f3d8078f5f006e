"""A rollout engine's server behind vLLM's protocol that holds no model: it answers at once, the same to the
same request, takes every bucket of weights, and answers wrongly where a fault says so.

A fault is a dict as of inject.py. Its point is `answer` (to a request for completions), `ack` (to a bucket)
or `commit`; its action one of those below; its step the one that the answer belongs to; its server the one of
several. It is hit `times` (None: for ever).
"""

import contextlib
import gzip
import http.server
import json
import random
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines" / "server"))

from fake_servers import vllm_answer
from outside import LEAVE_SECONDS

from megagrpo.wire.bucket_manifest import BucketManifest, build_ack

LARGE_BYTES = 400 * 2**20
_PIECE = b" " * 2**20


def _with(change):
    """An action that changes the first completion and answers all of them."""

    def act(handler, completions):
        change(completions[0])
        handler.answer(vllm_answer(completions))

    return act


def _body(data: bytes, status: int = 200, **headers: str):
    return lambda handler, *_: handler.send(data, status, **headers)


def _drop(handler, *_) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def _cut_off(handler, *_) -> None:
    """Less than the length that was announced."""
    handler.send(b'{"choices": [', length=10_000)
    _drop(handler)


def _large(handler, *_) -> None:
    """400 MB of blanks, in which JSON may begin."""
    handler.send(b"", length=LARGE_BYTES)
    with contextlib.suppress(OSError):  # nobody reads that far
        for _ in range(LARGE_BYTES // len(_PIECE)):
            handler.wfile.write(_PIECE)
    handler.close_connection = True


def _silent(handler, *_) -> None:
    """Until the client has gone: it sends nothing more."""
    handler.rfile.read(1)
    handler.close_connection = True


def _put(**fields):
    return _with(lambda completion: completion.update(fields))


def _spans(spans):
    return _with(lambda one: one.update(spans=spans(one["spans"], len(one["token_ids"]))))


ACTIONS = {
    "null": _body(b"null"),
    "other fields": _body(b'{"text": "4 9 9 1"}'),
    "no completions": _body(b'{"choices": []}'),
    "more tokens than asked": _with(
        lambda one: one.update(
            token_ids=one["token_ids"] * 9,
            logprobs=one["logprobs"] * 9,
            spans=[(version, 0, 9 * end) for version, _, end in one["spans"]],
        )
    ),
    "a version from the future": _spans(lambda spans, _: [(1_000, *spans[0][1:])]),
    "no versions": _spans(lambda *_: None),
    "a version of no tokens": _spans(lambda spans, _: [(spans[0][0], 0, 1)]),
    "an unknown finish reason": _put(finish_reason="banana"),
    "an id beyond the vocabulary": _with(lambda one: one["token_ids"].__setitem__(0, 10**6)),
    "an id as text": _with(lambda one: one["token_ids"].__setitem__(0, "7")),
    "a positive log-prob": _with(lambda one: one["logprobs"].__setitem__(0, 0.5)),
    "a log-prob that is no number": _with(lambda one: one["logprobs"].__setitem__(0, float("nan"))),
    "a log-prob too few": _with(lambda one: one["logprobs"].pop()),
    "an empty completion": _put(token_ids=[], logprobs=[], spans=[]),
    "not JSON": _body(b"<html>Bad gateway</html>"),
    "not UTF-8": _body(b'{"choices": "\xff\xfe"}'),
    "nested too deep": _body(b"[" * 100_000),
    "an error of the server": _body(b"Internal Server Error: out of memory", 500),
    "400 MB": _large,
    "400 MB in a packed body": _body(gzip.compress(bytes(LARGE_BYTES)), Content_Encoding="gzip"),
    "a dropped connection": _drop,
    "a body that is cut off": _cut_off,
    "silence": _silent,
}
"""Name -> what is done in the place of a good answer, given the handler and the good completions."""

_DIGITS = slice(1, 5)  # of the quickstart's prompts: ^4192=


class FakeEngine:
    """One server.

    Attributes:
        address: of it.
        notes: what was answered wrongly, as the injectors of the ranks note it.
    """

    def __init__(self, number: int):
        self.number, self.notes, self._faults = number, [], []
        self.version, self._open, self._lock = 0, 0, threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads, self._server.handle_error = True, lambda *_: None
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def begin(self, faults: list[dict]) -> None:
        """Take the faults of the next launch."""
        self.notes = []
        self._faults = [
            dict(fault, passed=0)
            for fault in faults
            if fault["point"] in ("answer", "ack", "commit") and fault.get("server", 0) == self.number
        ]

    def spoil(self, point: str, step: int):
        """Return what is to be done instead of a good answer; None: nothing."""
        with self._lock:
            for fault in self._faults:
                if fault["point"] != point or fault["step"] != step:
                    continue
                if (times := fault.get("times", 1)) is not None and fault["passed"] >= times:
                    continue
                fault["passed"] += 1
                note = {"kind": "fault", "point": point, "action": fault["action"], "step": step}
                self.notes.append(note | {"time": time.time(), "rank": None})
                return ACTIONS[fault["action"]]
        return None

    def count_connection(self, change: int) -> None:
        """Note that a connection was opened or closed."""
        with self._lock:
            self._open += change

    def is_connected(self) -> bool:
        """Say whether a client is there that does not go within LEAVE_SECONDS."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._open and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._open > 0

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()


def sample(body: dict, version: int) -> list[dict]:
    """Return the completions of a request: half of them sort the prompt's digits, as its seed says."""
    asked, completions = body["sampling_params"], []
    for index in range(asked["n"]):
        draw = random.Random(asked["seed"] + index)
        token_ids = sorted(body["token_ids"][_DIGITS])
        if draw.random() < 0.5:
            draw.shuffle(token_ids)
        token_ids.append(asked["stop_token_ids"][0])
        completions.append(
            {
                "token_ids": token_ids,
                "logprobs": [-draw.random() for _ in token_ids],
                "finish_reason": "stop",
                "spans": [(str(version), 0, len(token_ids))],
            }
        )
    return completions


def _handler_of(engine: FakeEngine) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            engine.count_connection(+1)
            super().setup()

        def finish(self) -> None:
            with contextlib.suppress(OSError):
                super().finish()
            engine.count_connection(-1)

        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            path = self.path.partition("?")[0]
            if path == "/inference/v1/generate":
                completions = sample(body, engine.version)
                if act := engine.spoil("answer", engine.version + 1):
                    act(self, completions)
                else:
                    self.answer(vllm_answer(completions))
            elif path == "/collective_rpc":
                self.answer_for_workers(body["method"], body["args"])
            elif path == "/update_weight_version":
                engine.version = int(body["new_version"])
                self.answer({})
            else:
                self.answer({"success": True} if path == "/reset_prefix_cache" else {})

        def answer_for_workers(self, method: str, arguments: list[str]) -> None:
            result: dict = {"rank": 0, "parameters": {"weight": {"dtype": "float32", "shape": [2]}}}
            act = None
            if method == "receive_bucket":
                manifest = BucketManifest.from_json(arguments[0])
                result, act = build_ack(manifest), engine.spoil("ack", manifest.version)
            elif method == "commit_weights":
                result = {"rank": 0, "version": int(arguments[0])}
                act = engine.spoil("commit", int(arguments[0]))
            if act:
                act(self)
            else:
                self.answer({"results": [result]})

        def answer(self, value) -> None:
            self.send(json.dumps(value).encode())

        def send(self, data: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) if length is None else length))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            with contextlib.suppress(OSError):  # a client that reads no further
                self.wfile.write(data)

        def log_message(self, *arguments) -> None:
            pass

    return Handler
