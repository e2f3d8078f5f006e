"""A checkpoint's files against its manifest: every kind of damage is named with both values."""

import json
import zlib

import pytest

from megagrpo.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ManifestError,
    checksum_file,
    read_manifest,
    record_file,
    verify_files,
    write_manifest,
)


@pytest.fixture
def saved(tmp_path):
    """A folder with two files and their manifest."""
    (tmp_path / "a.bin").write_bytes(b"shard a" * 1000)
    (tmp_path / "b.bin").write_bytes(b"")
    files = tuple(record_file(tmp_path, name) for name in ("a.bin", "b.bin"))
    manifest = Manifest(
        step=3,
        weight_version=4,
        model={"layers": 2},
        tokenizer={"tokens": 9},
        layout={"tp": 2},
        versions={},
        files=files,
    )
    write_manifest(tmp_path, manifest)
    return tmp_path, manifest


def test_a_manifest_reads_back_equal(saved):
    folder, manifest = saved
    assert read_manifest(folder) == manifest


def test_checksum_is_the_standard_crc_of_the_whole_file(tmp_path):
    """CRC-32 of "123456789" is cbf43926 by its published check value; a file larger than one block agrees
    with zlib's one-shot value.
    """
    (tmp_path / "check").write_bytes(b"123456789")
    assert checksum_file(tmp_path / "check") == "cbf43926"
    large = bytes(range(256)) * 20000
    (tmp_path / "large").write_bytes(large)
    assert checksum_file(tmp_path / "large") == f"{zlib.crc32(large):08x}"


def test_an_untouched_checkpoint_has_no_problems(saved):
    folder, manifest = saved
    assert verify_files(folder, manifest.files) == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.unlink(), "a.bin: missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "a.bin: 100 bytes, the manifest says 7000"),
        (lambda path: path.write_bytes(b"X" + path.read_bytes()[1:]), "a.bin: checksum"),
    ],
    ids=["missing", "truncated", "one byte changed"],
)
def test_damage_is_named(saved, damage, told):
    folder, manifest = saved
    damage(folder / "a.bin")
    (problem,) = verify_files(folder, manifest.files)
    assert problem.startswith(told)


def test_without_a_manifest_the_save_was_not_finished(tmp_path):
    with pytest.raises(ManifestError, match="not finished"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}'])
def test_a_damaged_manifest_is_named(saved, text):
    folder, _ = saved
    (folder / MANIFEST).write_text(text)
    with pytest.raises(ManifestError, match="damaged"):
        read_manifest(folder)


def test_a_manifest_of_a_newer_format_can_still_be_told_apart(saved):
    folder, _ = saved
    values = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(values | {"format_version": 99, "something_new": 1}))
    assert read_manifest(folder).format_version == 99
