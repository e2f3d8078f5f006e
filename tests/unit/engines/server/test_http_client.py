"""No call to a server lasts longer than the server, or than its time-out."""

import contextlib
import http.server
import json
import socket
import threading
import time

import pytest

from megagrpo.engines.base import EngineError
from megagrpo.engines.server import http_client
from megagrpo.engines.server.http_client import (
    NO_ANSWER,
    Call,
    EngineClient,
    EngineUnreachable,
    split_credentials,
)


@pytest.fixture
def server():
    """A server that answers as the path says; `server.posts` holds what came."""
    released = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/endless":
                return self._answer(200, {})
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client goes
                while not released.is_set():
                    self.wfile.write(b"x" * 2**20)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            posts.append((self.path, body))
            if self.path == "/wait":
                released.wait(60)
            if self.path.startswith("/drop") and len(posts) <= httpd.drops:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if self.path.endswith("release"):
                released.set()
            if self.path == "/large":
                return self._answer(200, ["x" * body])
            with contextlib.suppress(BrokenPipeError):  # a client that waits no longer
                self._answer(400 if self.path == "/refuse" else 200, {"sent": body})

        def _answer(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    posts = []
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    httpd.posts, httpd.drops = posts, 0
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd
    released.set()
    httpd.shutdown()
    httpd.server_close()


def client_of(server, timeout_seconds=60.0, end=lambda: None):
    return EngineClient(f"http://127.0.0.1:{server.server_port}", timeout_seconds, end)


def never():
    return False


def ignore(number, answer):
    pass


def test_every_answer_is_handed_over_with_the_number_of_its_call(server):
    answers = {}
    client_of(server).call_all(
        [Call("/echo", {"number": number}) for number in range(20)], answers.__setitem__, 3, never, []
    )
    assert answers == {number: {"sent": {"number": number}} for number in range(20)}


def test_an_error_in_what_is_done_with_an_answer_ends_the_call(server):
    def on_answer(number, answer):
        raise ValueError("scoring failed")

    with pytest.raises(ValueError, match="scoring failed"):
        client_of(server).call_all([Call("/echo", 1), Call("/wait", 2)], on_answer, 2, never, [])


def test_a_refusal_carries_what_the_server_said(server):
    client = client_of(server)
    with pytest.raises(EngineError, match=r'/refuse answered 400: \{"sent": \{"x": 1\}\}'):
        client.call("/refuse", {"x": 1})
    with pytest.raises(EngineError, match="/refuse answered 400"):
        client.call_all([Call("/echo", 1), Call("/refuse", 2)], ignore, 2, never, [])


def test_silence_ends_with_the_time_out(server):
    client = client_of(server, timeout_seconds=0.5)
    with pytest.raises(
        EngineUnreachable,
        match=r"/wait was answered within engine.server.request_timeout_seconds "
        r"= 0.5",
    ):
        client.call("/wait", {})
    with pytest.raises(
        EngineUnreachable,
        match=r"no request was answered within "
        r"engine.server.request_timeout_seconds = 0.5",
    ):
        client.call_all([Call("/wait", {})], ignore, 1, never, [])


def test_a_request_that_takes_longer_than_the_time_out_is_waited_for_while_the_server_gives_signs(server):
    """32,768 tokens at 40 a second are a quarter of an hour, and a request is all completions of a prompt."""
    client, answers, timeout = client_of(server, timeout_seconds=2.0), {}, 2.0
    release = threading.Timer(3 * timeout, lambda: client.call("/release", {}))
    release.start()
    started = time.monotonic()
    client.call_all([Call("/wait", 1)], answers.__setitem__, 1, never, [], Call("/alive", 0))
    release.join()
    assert answers == {0: {"sent": 1}} and time.monotonic() - started > 2 * timeout


def test_signs_of_life_do_not_excuse_a_server_that_never_answers(server):
    """Another client has paused it, or it has lost the request."""
    client = client_of(server, timeout_seconds=0.3)
    with pytest.raises(EngineUnreachable, match="no request was answered within"):
        client.call_all([Call("/wait", {})], ignore, 1, never, [], Call("/alive", 0))


@pytest.mark.parametrize("sign", ["/wait", "/refuse"])
def test_a_server_whose_sign_of_life_does_not_come_or_is_no_good_one_is_silent(server, sign):
    client = client_of(server, timeout_seconds=1.0)
    with pytest.raises(EngineUnreachable, match="no request was answered within"):
        client.call_all([Call("/wait", {})], ignore, 1, never, [], Call(sign, {}))


def test_the_end_of_the_server_ends_the_wait(server):
    client = client_of(server, end=lambda: "the server was killed by SIGKILL" if server.posts else None)
    with pytest.raises(EngineUnreachable, match="killed by SIGKILL"):
        client.call_all([Call("/wait", {})], ignore, 1, never, [])


def test_a_server_that_is_not_there_is_unreachable(server):
    client = client_of(server)
    assert client.is_answering("/health")
    server.shutdown()
    server.server_close()
    assert not client.is_answering("/health")
    with pytest.raises(EngineUnreachable, match="ConnectError"):
        client.call("/echo", {})


def test_an_abort_is_sent_and_keeps_back_what_was_not(server):
    aborted = threading.Event()
    result = {}
    calls = [Call("/wait", {"number": 0}), Call("/echo", {"number": 1})]
    client = client_of(server)
    thread = threading.Thread(
        target=client.call_all,
        args=(calls, result.__setitem__, 1, aborted.is_set, [Call("/release", {"ids": [0]})]),
    )
    thread.start()
    deadline = time.monotonic() + 60
    while not server.posts and time.monotonic() < deadline:
        time.sleep(0.01)
    aborted.set()
    thread.join(60)
    assert result == {0: {"sent": {"number": 0}}, 1: NO_ANSWER}
    assert ("/release", {"ids": [0]}) in server.posts and ("/echo", {"number": 1}) not in server.posts


@pytest.mark.parametrize("abort_path", ["/ignored", "/wait"])
def test_an_abort_that_the_server_does_not_follow_ends_the_call_too(server, monkeypatch, abort_path):
    monkeypatch.setattr(http_client, "_ABORT_SECONDS", 0.4)
    result = {}
    calls = [Call("/wait", {"id": number}) for number in range(3)]
    begun = time.monotonic()
    client_of(server).call_all(calls, result.__setitem__, 2, lambda: True, [Call(abort_path, {})])
    assert result == dict.fromkeys(range(3), NO_ANSWER)
    asked = threading.Event()
    threading.Timer(0.5, asked.set).start()
    client_of(server).call_all(calls, result.__setitem__, 2, asked.is_set, [Call(abort_path, {})])
    assert result == dict.fromkeys(range(3), NO_ANSWER)  # two were sent, the third waited for its place
    assert sum(path == "/wait" and "id" in body for path, body in server.posts) == 2
    assert time.monotonic() - begun < 30


def test_an_abort_whose_connection_breaks_is_sent_again(server):
    server.drops, result = 2, {}  # the request itself comes first
    client_of(server).call_all(
        [Call("/wait", {})], result.__setitem__, 1, lambda: bool(server.posts), [Call("/drop_release", {})]
    )
    assert result == {0: {"sent": {}}}
    assert [path for path, _ in server.posts][:3] == ["/wait", "/drop_release", "/drop_release"]


def test_a_server_that_answers_its_health_without_end_is_there(server):
    assert client_of(server).is_answering("/endless")


@pytest.mark.parametrize("drops", [1, 2, 3])
def test_a_connection_that_breaks_is_tried_three_times(server, drops):
    server.drops, answers = drops, {}
    client = client_of(server)
    calls = (
        lambda: client.call("/drop", {}, is_repeatable=True),
        lambda: client.call_all([Call("/drop", {}, about="prompt 3")], answers.__setitem__, 1, never, []),
    )
    for call in calls:
        server.posts.clear()
        if drops < 3:
            call()
        else:
            with pytest.raises(EngineUnreachable, match=rf"http://127.0.0.1:{server.server_port}/drop"):
                call()
        assert len(server.posts) == min(drops + 1, 3)
    assert len(answers) == (drops < 3)


def test_a_call_that_may_have_been_followed_is_not_made_again(server):
    server.drops = 1
    with pytest.raises(EngineUnreachable):
        client_of(server).call("/drop", {})
    assert len(server.posts) == 1


def test_an_answer_that_is_larger_than_what_was_asked_for_is_not_read_on(server):
    call = Call("/large", 50_000_000, answer_bytes=1000, about="prompt 3: completion 0")
    with pytest.raises(EngineError, match=r"/large \(prompt 3: completion 0\): .* larger than 1000 bytes"):
        client_of(server).call_all([call], ignore, 1, never, [])


@pytest.mark.parametrize(
    ("address", "bare", "credentials"),
    [
        ("http://host:1", "http://host:1", None),
        ("http://me:p%40ss@host:1", "http://host:1", ("me", "p@ss")),
        ("https://token@[::1]:80/x", "https://[::1]:80/x", ("token", "")),
    ],
)
def test_user_and_password_are_split_off_an_address(address, bare, credentials):
    assert split_credentials(address) == (bare, credentials)
