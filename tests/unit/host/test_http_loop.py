"""The loop that serves an engine without a web framework: what clients send comes in whole, and one
mistake ends nobody else's request.
"""

import asyncio
import json
import threading

import httpx2 as httpx
import pytest

from megagrpo.host import http_loop


@pytest.fixture
def address():
    """Of a loop that echoes, waits for another request, refuses, and fails."""
    arrived = asyncio.Event()

    async def echo(body):
        return body

    async def wait(body):
        await arrived.wait()
        return b'"waited"'

    async def arrive(body):
        arrived.set()
        return b""

    async def refuse(body):
        raise http_loop.RefusedError("not this")

    async def fail(body):
        raise ZeroDivisionError("division by zero")

    handlers = {"echo": echo, "wait": wait, "arrive": arrive, "refuse": refuse, "fail": fail}
    taken = http_loop.bind("127.0.0.1", 0)
    loop = asyncio.new_event_loop()
    task = loop.create_task(
        http_loop.serve(taken, {("POST", f"/{name}"): handler for name, handler in handlers.items()})
    )
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{taken.getsockname()[1]}"
    loop.call_soon_threadsafe(task.cancel)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_bodies_of_any_size_come_back_over_one_connection(address):
    with httpx.Client(base_url=address, timeout=30) as client:
        for size in (0, 1, 200_000):
            sent = {"text": "\u00e9" * size}
            assert client.post("/echo", json=sent).json() == sent


def test_requests_are_answered_out_of_order(address):
    with httpx.Client(base_url=address, timeout=30) as client:
        waiting = threading.Thread(target=lambda: answers.append(client.post("/wait").json()))
        answers = []
        waiting.start()
        assert client.post("/arrive").content == b""
        waiting.join(30)
    assert answers == ["waited"]


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/refuse", 400, "not this"),
        ("/fail", 500, "ZeroDivisionError: division by zero"),
        ("/nothing?of=this", 404, "POST /nothing?of=this: no such route"),
    ],
)
def test_what_goes_wrong_is_told_and_the_connection_goes_on(address, path, status, error):
    with httpx.Client(base_url=address, timeout=30) as client:
        answer = client.post(path, json={})
        assert (answer.status_code, json.loads(answer.content)) == (status, {"error": error})
        assert client.post("/echo", json=[1]).json() == [1]


def test_a_port_that_is_taken_is_told_at_once():
    taken = http_loop.bind("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(OSError, match="Address already in use"):
        http_loop.bind("127.0.0.1", taken.getsockname()[1])
    taken.close()
