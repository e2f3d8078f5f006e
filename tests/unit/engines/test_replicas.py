"""Ranks and servers: every rank has one, every server has an owner among its ranks."""

import pytest

from megagrpo.config.load import load_config
from megagrpo.engines import replicas
from megagrpo.engines.replicas import (
    build_rollout_engine,
    owner_of_replica,
    replica_of_rank,
    replicas_of_ranks,
)
from megagrpo.errors import ConfigError
from megagrpo.planning.components import verify_components


@pytest.mark.parametrize("world_size", range(1, 13))
def test_the_owner_of_a_replica_is_the_first_of_its_ranks_and_shares_are_equal_up_to_one(world_size):
    for num_replicas in range(1, world_size + 1):
        replicas = [replica_of_rank(rank, world_size, num_replicas) for rank in range(world_size)]
        assert replicas == sorted(replicas) and set(replicas) == set(range(num_replicas))
        shares = [replicas.count(replica) for replica in range(num_replicas)]
        assert max(shares) - min(shares) <= 1
        assert [owner_of_replica(replica, world_size, num_replicas) for replica in range(num_replicas)] == [
            replicas.index(replica) for replica in range(num_replicas)
        ]


OWN_ENGINES = """
class InRanks:
    is_embedded = True

    def __init__(self, model_folder, config, *, tokenizer, device, dtype, load_weights=True):
        self.built_with = (model_folder, config.name, tokenizer)

class InServers:
    is_embedded = False

    def __init__(self, model_folder, config, *, tokenizer, device, dtype, address, log_file):
        self.address, self.log_file, self.server = "http://here:1", log_file, config.server

    def check_model(self): ...

class Forgetful:
    def __init__(self, model_folder, config): ...

class Deaf:
    is_embedded = True

    def __init__(self, model_folder): ...
"""


@pytest.fixture
def config_with(tmp_path):
    """A function (class name) -> a configuration whose engine is that class of a user's file."""
    (tmp_path / "engines_of_mine.py").write_text(OWN_ENGINES)
    return lambda name: load_config(
        "examples/quickstart/quickstart.yaml", [f"engine={{name: '{tmp_path}/engines_of_mine.py:{name}'}}"]
    )


class OneRank:
    rank, world_size = 0, 1


def test_an_engine_of_the_users_own_is_built_where_the_configuration_names_it(
    config_with, monkeypatch, tmp_path
):
    config = config_with("InRanks")
    verify_components(config)
    assert replicas_of_ranks(config.engine, 3) == [0, 1, 2]
    engine = build_rollout_engine(
        config.engine, tmp_path, 64, OneRank(), "folder", "tokenizer", "cpu", "float32"
    )
    assert engine.built_with == ("folder", config.engine.name, "tokenizer")

    config = config_with("InServers")
    verify_components(config)
    assert replicas_of_ranks(config.engine, 3) == [0, 0, 0]
    monkeypatch.setattr(replicas, "all_gather_metadata", lambda value: [value])
    engine = build_rollout_engine(
        config.engine, tmp_path, 64, OneRank(), "folder", "tokenizer", "cpu", "float32"
    )
    assert engine.log_file.parts[-2:] == ("engines", "InServers_0.log")


@pytest.mark.parametrize(("given", "expected"), [(None, 37 + 11), (300, 300)])
def test_servers_have_room_for_the_longest_sequence_of_the_run_unless_told(
    config_with, monkeypatch, given, expected, tmp_path
):
    """Not for all positions of the model: keys and values for them may not fit beside the trainer."""
    config = config_with("InServers")
    server = config.engine.server.model_copy(update={"max_model_len": given})
    config = config.model_copy(
        update={
            "data": config.data.model_copy(update={"max_prompt_tokens": 37}),
            "rollout": config.rollout.model_copy(update={"max_new_tokens": 11}),
            "engine": config.engine.model_copy(update={"server": server}),
        }
    )
    monkeypatch.setattr(replicas, "all_gather_metadata", lambda value: [value])
    engine = build_rollout_engine(
        config.engine,
        tmp_path,
        config.longest_sequence_tokens,
        OneRank(),
        "folder",
        "tokenizer",
        "cpu",
        "float32",
    )
    assert engine.server.max_model_len == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Forgetful", "it has no is_embedded"),
        ("Deaf", "it is called with .model_folder, config, tokenizer=, device=, dtype=. and takes"),
        ("InRank", "has no 'InRank'; did you mean InRanks?"),
    ],
)
def test_what_is_no_engine_is_told_before_the_launch(config_with, name, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        verify_components(config_with(name))
    (line,) = caught.value.problems
    assert line.startswith("engine.name: ") and "\n" not in line
