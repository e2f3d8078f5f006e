"""What a killed process has left in shared memory is removed by the next run, and nothing else."""

import os
import subprocess
import sys
import time

from megagrpo.supervision.orphaned_files import remove_orphans
from megagrpo.weights.transports.shared_memory import MappedFile

MAKER = (
    "import sys, time; from pathlib import Path\n"
    "from megagrpo.weights.transports.shared_memory import MappedFile\n"
    "file = MappedFile(Path(sys.argv[1]), 4096, create=True); print('there', flush=True); time.sleep(100)"
)


def age(path):
    os.utime(path, (time.time() - 60,) * 2)


def test_the_file_of_a_killed_process_is_an_orphan_and_that_of_a_live_one_is_not(tmp_path):
    path = tmp_path / "megagrpo_slot"
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert maker.stdout.readline() == "there\n"
        age(path)
        assert remove_orphans(tmp_path) == [] and path.exists()
    finally:
        maker.kill()
        maker.wait()
    assert remove_orphans(tmp_path) == ["megagrpo_slot"] and not path.exists()


def test_what_is_young_a_link_or_not_ours_stays(tmp_path):
    for name in ("megagrpo_young", "somebody_else"):
        (tmp_path / name).touch()
    age(tmp_path / "somebody_else")
    (tmp_path / "megagrpo_link").symlink_to(tmp_path / "somebody_else")
    (tmp_path / "megagrpo_folder").mkdir()
    age(tmp_path / "megagrpo_folder")
    assert remove_orphans(tmp_path) == []


def test_a_mapped_file_is_held_until_it_is_let_go(tmp_path):
    file = MappedFile(tmp_path / "megagrpo_slot", 4096, create=True)
    age(file.path)
    assert remove_orphans(tmp_path) == []
    file.remove()
    assert not file.path.exists()
