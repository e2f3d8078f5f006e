"""A stop ends what the ranks wait for: the requests at a server, the scores; what runs beside the training
goes on.
"""

import http.server
import json
import threading

import pytest

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.engines.base import EngineError
from megagrpo.errors import StopRequested
from megagrpo.rollout import generation
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.in_flight import RolloutRequest, read_shares
from megagrpo.types import Prompt, SamplingParams

ONE_STEP_OFF = "rollout.off_policy=one_step_off"


class OneRank:
    rank, world_size = 0, 1


def request(num_prompts=6):
    return RolloutRequest(
        [Prompt(number, str(number), (1, 2)) for number in range(num_prompts)], SamplingParams(8), 2
    )


class Stop:
    """What the supervisor's thread does from a signal on."""

    def __init__(self, *generators):
        self.generators, self.done = generators, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.done.wait(0.05):
            for generator in self.generators:
                generator.give_up()

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *exception):
        self.done.set()
        self.thread.join(30)


@pytest.fixture
def busy_server():
    """Stands in for an SGLang server: it answers a request when that is aborted, and tells what it was
    asked.
    """
    asked, ended, came = [], {}, threading.Condition()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer({})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/abort_request":
                with came:
                    ended[body["rid"]] = True
                    came.notify_all()
                return self._answer({})
            with came:
                asked.extend(body["rid"])
                came.notify_all()
                assert came.wait_for(lambda: all(rid in ended for rid in body["rid"]), timeout=30)
            meta = {
                "finish_reason": {"type": "abort"},
                "weight_version": "0",
                "weight_versions": None,
                "output_token_logprobs": [],
            }
            return self._answer([{"output_ids": [], "meta_info": meta} for _ in body["rid"]])

        def _answer(self, body):
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", asked, ended
    httpd.shutdown()
    httpd.server_close()


def test_requests_at_a_server_are_aborted_and_the_rollout_is_given_up(
    one_rank, scripted_rewards, tiny_hf_folder, busy_server
):
    address, asked, ended = busy_server
    engine = ENGINES.get("sglang")(
        tiny_hf_folder("qwen3"),
        build_engine_config(name="sglang", max_batch_completions=4, server={"addresses": (address,)}),
    )
    engine._lifecycle.serve_from_start()
    generator = RolloutGenerator(engine, scripted_rewards(), OneRank(), [0], is_embedded=False)
    with Stop(generator), pytest.raises(StopRequested):
        generator.generate(request())
    assert set(asked) <= set(ended) and len(asked) < 12  # what had not been sent stays here
    engine.close()


def test_scores_are_not_waited_for(one_rank, engine):
    class NeverScores:
        def submit(self, prompts, completions):
            return generation.Future()

    generator = RolloutGenerator(engine, NeverScores(), OneRank(), [0])
    with Stop(generator), pytest.raises(StopRequested):
        generator.generate(request())


def test_the_step_that_is_generated_ahead_goes_on_to_its_end(build_pipeline, engine, tmp_path):
    """The weights it is sampled under are overwritten by the step that a late stop still finishes: the
    resumed run needs all of it.
    """
    may_go_on = threading.Event()
    pipeline = build_pipeline(ONE_STEP_OFF)
    engine.before = lambda prompt: len(engine.asked) >= 6 and may_go_on.wait(30.0)
    pipeline.collect(1, 0)
    pipeline.generator.give_up()
    assert not engine.aborted
    may_go_on.set()
    for name, contents in pipeline.snapshot().files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(contents)
    assert len(read_shares(tmp_path, 1, 0, 1).completions) == 6
    with pytest.raises(StopRequested):
        pipeline.collect(2, 0)  # all of it is there, and not trained on any more


def test_a_stop_on_one_rank_ends_the_rollout_on_all_and_comes_before_failures(
    monkeypatch, scripted_engine, scripted_rewards
):
    """A signal to the whole job also ends the servers: that is no failure then."""
    told = [None, None]
    barrier = threading.Barrier(2, timeout=30)
    local = threading.local()

    def all_gather(value):
        told[local.rank] = value
        barrier.wait()
        return list(told)

    class Groups:
        def __init__(self, rank):
            self.rank, self.world_size = rank, 2

    monkeypatch.setattr(generation, "all_gather_metadata", all_gather)
    monkeypatch.setattr(generation, "wait_for_all_ranks", barrier.wait)
    generators = [
        RolloutGenerator(scripted_engine(), scripted_rewards(), Groups(rank), range(2)) for rank in range(2)
    ]

    def dies(prompt):
        raise EngineError("the server is gone")

    generators[1].engine.before = dies
    generators[0].give_up()
    errors = [None, None]

    def run(rank):
        local.rank = rank
        try:
            generators[rank].generate(request())
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [type(error) for error in errors] == [StopRequested] * 2
