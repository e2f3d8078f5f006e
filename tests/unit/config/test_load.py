"""What a user reads when a configuration is wrong, and that a resolved one reloads to itself."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.config.load import dump_config, load_config
from megagrpo.config.mistakes import sections_of
from megagrpo.config.rollout_sections import DataConfig
from megagrpo.config.schema import Config
from megagrpo.config.yaml_core import format_yaml, parse_yaml
from megagrpo.errors import ConfigError

MINIMAL = """
model: {path: tiny}
data: {source: train.jsonl}
rewards: {functions: [{name: exact}]}
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="run.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def problems_of(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    for line in caught.value.problems:
        assert "\n" not in line
        assert not re.search(
            r"Input should|pydantic|https?:|Extra inputs|validation error|Field required", line
        )
    return caught.value.problems


def test_a_minimal_file_takes_defaults_for_the_rest(write):
    config = load_config(write(MINIMAL))
    assert config.rollout.completions_per_prompt == 8
    assert config.rewards.functions[0].name == "exact"


def test_overrides_win_over_the_file_and_are_read_as_yaml(write):
    path = write(MINIMAL + "optimizer: {lr: 0.1}\n")
    config = load_config(
        path,
        [
            "optimizer.lr=3e-5",
            "update.packing=false",
            "rollout.stop=['\\n', '###']",
            "rewards.functions.0.weight=2",
        ],
    )
    assert config.optimizer.lr == 3e-5
    assert config.update.packing is False
    assert config.rollout.stop == ("\\n", "###")
    assert config.rewards.functions[0].weight == 2.0


def test_bases_merge_deeply_and_lists_replace(write):
    write(
        MINIMAL + "rollout: {stop: [a, b], temperature: 0.5}\nalgorithm: {kl: {coef: 0.1}}\n",
        "shared/base.yaml",
    )
    write("base: base.yaml\nalgorithm: {kl: {estimator: k1}}\n", "shared/middle.yaml")
    path = write("base: shared/middle.yaml\nrollout: {stop: [c]}\n")
    config = load_config(path)
    assert config.rollout.stop == ("c",)
    assert config.rollout.temperature == 0.5
    assert (config.algorithm.kl.coef, config.algorithm.kl.estimator) == (0.1, "k1")


def test_a_base_circle_is_named(write):
    write("base: b.yaml\n", "a.yaml")
    path = write("base: a.yaml\n", "b.yaml")
    (line,) = problems_of(path)
    assert re.fullmatch(r".*a\.yaml: base: a circle: .*b\.yaml -> .*a\.yaml -> .*b\.yaml", line)


def test_a_missing_base_names_the_file_that_asks_for_it(write):
    (line,) = problems_of(write("base: gone.yaml\n"))
    assert re.fullmatch(r".*run\.yaml: base: .*gone\.yaml: no such file", line)


def test_all_mistakes_are_reported_at_once_in_plain_lines(write):
    path = write(
        "data: {source: x}\nalgorithm: {clip_hgh: 0.3}\nrollout: {temperature: -1, top_k: "
        "2.5}\nrewards: {functions: []}\n"
    )
    lines = problems_of(path, ["optimizer.learning=1", "parallell.tp=2"])
    assert "model.path: missing" in lines
    assert "algorithm.clip_hgh: not a field; did you mean clip_high?" in lines
    assert "rollout.temperature: -1: must be greater than 0" in lines
    assert "rollout.top_k: 2.5: must be a whole number" in lines
    assert "rewards.functions: []: must have at least one entry" in lines
    assert "parallell: not a field; did you mean parallel?" in lines
    (optimizer,) = [line for line in lines if line.startswith("optimizer.")]
    assert optimizer.startswith(
        "optimizer.learning: not a field; optimizer has lr, min_lr_fraction, warmup_steps"
    )
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.lr=1", "rollout.lr: not a field; did you mean optimizer.lr?"),
        ("lr=1", "lr: not a field; did you mean optimizer.lr?"),
        ("run.steps=true", "run.steps: true: must be a whole number"),
        ("run.steps=0", "run.steps: 0: must be at least 1"),
        ("run.steps=many", 'run.steps: "many": must be a whole number'),
        ("update.packing=yes", 'update.packing: "yes": must be true or false'),
        ("model.path=3", "model.path: 3: must be a string"),
        ("optimizer.lr=.nan", "optimizer.lr: NaN: must be a finite number"),
        ("optimizer.lr=.inf", "optimizer.lr: Infinity: must be a finite number"),
        ("optimizer.beta1=1.5", "optimizer.beta1: 1.5: must be at most 1"),
        ("rollout.stop=x", 'rollout.stop: "x": must be a list'),
        ("rollout.stop_token_ids=[1, a]", 'rollout.stop_token_ids.1: "a": must be a whole number'),
        (
            "precision.recipe=bf61",
            'precision.recipe: "bf61": must be one of fp32, bf16, fp8_delayed, fp8_tensorwise, '
            "fp8_blockwise, mxfp8; did you mean bf16?",
        ),
        (
            "data=0.1",
            f"data: 0.1: must be a section with some of the fields {', '.join(DataConfig.model_fields)}",
        ),
        ("algorithm.kl.coeff=1", "algorithm.kl.coeff: not a field; did you mean coef?"),
        ("run.dir.x=1", 'run.dir: {"x": 1}: must be a string'),
        ("rewards.functions.0.nam=x", "rewards.functions.0.nam: not a field; did you mean name?"),
        (
            "rewards.functions.0.options=3",
            "rewards.functions.0.options: 3: must be a mapping of names to values",
        ),
        (
            "rewards.functions.4.name=x",
            "rewards.functions.4.name: rewards.functions is a list of 1: its entries are "
            "rewards.functions.0 to rewards.functions.0",
        ),
        ("algorithm.loss_options={a: b}", 'algorithm.loss_options.a: "b": must be a number'),
        (
            "algorithm.kl={estimator: exact, placement: reward}",
            "algorithm.kl.estimator: exact is a loss term; placement reward takes k1, k2, k3 or abs",
        ),
        ("steps", "steps: an override is written section.field=value"),
        ("rollout..x=1", "rollout..x=1: an override is written section.field=value"),
        (
            "rollout.stop=[a",
            "rollout.stop, line 1, column 3: not valid YAML: expected ',' or ']', but got '<stream end>'",
        ),
    ],
)
def test_each_kind_of_mistake_reads_as_one_clear_line(write, override, line):
    assert problems_of(write(MINIMAL), [override]) == [line]


def test_missing_sections_name_the_fields_that_are_needed(write):
    lines = problems_of(write(""))
    assert lines == ["model.path: missing", "data: missing", "rewards.functions: missing"]


def test_an_empty_section_means_nothing_set(write):
    assert load_config(write(MINIMAL + "optimizer:\nalgorithm:\n  kl:\n")).optimizer.beta1 == 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run: {steps: 1}\nrun: {steps: 2}\n",
            "line 2, column 1: not valid YAML: the key run is written twice",
        ),
        ("- a\n", "must hold sections of fields"),
        ("run: [\n", "not valid YAML"),
        ("base: [a]\n", "base: must be the path of one file"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(write, text, message):
    (line,) = problems_of(write(text))
    assert "run.yaml" in line
    assert message in line


def test_a_missing_file_is_one_line(tmp_path):
    assert problems_of(tmp_path / "none.yaml") == [f"{tmp_path}/none.yaml: no such file"]


def test_dumped_config_reloads_to_an_equal_config(write):
    overrides = [
        "rollout.stop=['no', '1e-6', '2024-01-01', 'a: b', '\"']",
        "optimizer.lr=1.0e-06",
        "rewards.functions.0.options={k: [1, no]}",
    ]
    config = load_config(write(MINIMAL), overrides)
    assert load_config(write(dump_config(config), "resolved.yaml")) == config


def test_every_field_is_in_the_dump(write):
    dumped = parse_yaml(dump_config(load_config(write(MINIMAL))), "dump")
    assert list(dumped) == list(Config.model_fields)
    assert all(
        list(dumped[name]) == list(sections_of(field.annotation)[0].model_fields)
        for name, field in Config.model_fields.items()
    )


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]))
)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_yaml_writing_and_reading_are_inverse(value):
    assert parse_yaml(format_yaml(value), "value") == value


def test_numbers_are_read_as_yaml_1_2_says():
    assert parse_yaml("[1e-6, 010, 1_000, 1:30, on, .5, -.inf]", "x") == [
        1e-6,
        10,
        "1_000",
        "1:30",
        "on",
        0.5,
        -math.inf,
    ]
