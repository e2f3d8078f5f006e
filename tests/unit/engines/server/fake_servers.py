"""Servers that answer requests for completions as vLLM and SGLang do, or as a test spoils it."""

import contextlib
import copy
import http.server
import json
import threading

GOOD = {
    "token_ids": [7, 9, 8],
    "logprobs": [-0.5, -1.25, -2.0],
    "finish_reason": "length",
    "spans": [("6", 0, 2), ("7", 2, 3)],
}
"""A completion, under weight versions 6 and 7."""


def spans(completion):
    if completion["spans"] is None:
        return None
    return [{"version": label, "start": start, "end": end} for label, start, end in completion["spans"]]


def vllm_answer(completions):
    return {
        "choices": [
            {
                "index": index,
                "token_ids": completion["token_ids"],
                "logprobs": {
                    "content": [{"token": "x", "logprob": value} for value in completion["logprobs"]]
                },
                "finish_reason": completion["finish_reason"],
                "weight_versions": spans(completion),
            }
            for index, completion in enumerate(completions)
        ]
    }


def sglang_answer(completions):
    return [
        {
            "output_ids": completion["token_ids"],
            "meta_info": {
                "id": "abc",
                "finish_reason": {"type": completion["finish_reason"]},
                "output_token_logprobs": [
                    [value, token_id, None]
                    for value, token_id in zip(completion["logprobs"], completion["token_ids"], strict=False)
                ],
                "weight_version": "7",
                "weight_versions": spans(completion),
            },
        }
        for completion in completions
    ]


ANSWERS = {"vllm": vllm_answer, "sglang": sglang_answer}
NUM_COMPLETIONS = {
    "vllm": lambda body: body["sampling_params"]["n"],
    "sglang": lambda body: len(body["input_ids"]),
}


class FakeServer:
    """Answers every request with good completions, or with what `spoil` makes of them.

    Attributes:
        spoil: takes the completions, which it may change in place, and returns None, or bytes to answer.
    """

    def __init__(self, kind, port):
        self.kind, self.address = kind, f"http://127.0.0.1:{port}"
        self.spoil = lambda completions: None
        self.headers = []

    def answer(self, body):
        completions = [copy.deepcopy(GOOD) for _ in range(NUM_COMPLETIONS[self.kind](body))]
        raw = self.spoil(completions)
        return json.dumps(ANSWERS[self.kind](completions)).encode() if raw is None else raw


@contextlib.contextmanager
def fake_server(kind):
    """Run a server of a kind, "vllm" or "sglang", while the context lasts."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(b"{}")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.headers.append(dict(self.headers))
            self.answer(server.answer(body))

        def answer(self, data):
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):  # a client that reads no further
                self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    server = FakeServer(kind, httpd.server_port)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
