"""What gloo allows and NCCL does not: over a backend that raises where NCCL would wait for ever."""

import pytest

pytestmark = pytest.mark.distributed


def test_the_first_publish_finds_its_communicator_made(results_of):
    """Only some ranks send in the first bucket. A communicator is made by all ranks of a group together, so
    it must be there before: `device_id` makes it with the process group.
    """
    results = results_of("strict_publish.py", ranks=4)
    assert results["with_the_communicator_of_device_id"] == "published"
    assert "would wait for ever for ranks" in results["without_it"]["error"]
