"""What a resume tells of a machine that computes otherwise than the one before."""

from megagrpo.checkpoint.resume import compare_environments


def test_another_number_of_threads_and_another_version_are_told():
    saved = {"torch": "2.13.0", "python": "3.11.7", "threads of a rank": "1"}
    told = compare_environments(saved, saved | {"torch": "2.14.0", "threads of a rank": "2", "new": "1.0"})
    assert [line.split(";")[0] for line in told] == [
        "warning: torch: 2.13.0 in the checkpoint, 2.14.0 in this run",
        "warning: threads of a rank: 1 in the checkpoint, 2 in this run",
    ]
    assert compare_environments(saved, saved) == []
