"""`sglang.Engine` in the child process (`engine.server.offline`): the engine contract again, on one process
for all of it.
"""

import psutil
import pytest

# The tests themselves are those of every engine; here they get this file's `build_engine`.
from test_engine_contract import (
    test_a_completion_does_not_depend_on_what_is_generated_beside_it,  # noqa: F401
    test_a_finished_group_is_handed_over_while_others_run,  # noqa: F401
    test_an_abort_returns_what_there_is,  # noqa: F401
    test_greedy_completions_equal_transformers_generate,  # noqa: F401
    test_logprobs_are_at_the_sampling_temperature_over_the_whole_vocabulary,  # noqa: F401
    test_stop_strings_and_stop_tokens_end_a_completion_with_the_token_that_completes_them,  # noqa: F401
)
from test_engine_update_contract import (
    test_a_commit_replaces_every_weight_and_drops_what_was_cached,  # noqa: F401
    test_a_wrong_tensor_is_named_and_its_update_never_serves,  # noqa: F401
    test_an_engine_that_slept_generates_at_the_latest_after_the_next_version,  # noqa: F401
    test_an_open_or_aborted_update_never_serves_a_mixture,  # noqa: F401
)

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def owner(tiny_hf_folder, tmp_path_factory):
    """The engine that started the process."""
    log_file = tmp_path_factory.mktemp("offline") / "engine.log"
    config = build_engine_config(name="sglang", server={"offline": True})
    engine = ENGINES.get("sglang")(
        tiny_hf_folder("qwen3", tie_word_embeddings=True), config, log_file=log_file
    )
    yield engine
    engine.close()


@pytest.fixture
def build_engine(owner, tiny_hf_folder):
    """A function (config, **options) -> a client of it, closed after the test."""
    built = []

    def build_engine(config=None, **options):
        fields = config.model_dump(exclude={"name"}, exclude_unset=True) if config else {}
        config = build_engine_config("sglang", **fields, server={"addresses": [owner.address]})
        built.append(
            ENGINES.get("sglang")(tiny_hf_folder("qwen3", tie_word_embeddings=True), config, **options)
        )
        return built[-1]

    yield build_engine
    for engine in built:
        engine.close()


def test_there_is_no_http_server_of_sglangs(owner):
    """The routes that its server has and ours has not."""
    with pytest.raises(Exception, match=r"answered 404.*no such route"):
        owner.server.call("/get_server_info")
    assert "--offline" in psutil.Process(owner.pid).cmdline()


def test_trainer_ranks_publish_straight_to_its_ranks(owner, tiny_hf_folder, publish_through_a_group):
    """Whole tensors: SGLang pads these small layers on a CPU."""
    publish_through_a_group(
        "sglang", owner.address, tiny_hf_folder("qwen3", tie_word_embeddings=True), layouts=("full",)
    )


def test_it_ends_when_its_scheduler_dies(owner):
    (scheduler,) = [child for child in psutil.Process(owner.pid).children() if "scheduler" in child.name()]
    scheduler.kill()
    psutil.Process(owner.pid).wait(60)
    assert owner.health().state == "dead"
