"""What is noted of a file while it is written is what is on the disk."""

import errno
import io
import os
import zlib

import pytest
import torch

from megagrpo.checkpoint.manifest import ChecksummedFile, checksum_file, verify_files, write_file


def test_the_record_is_that_of_the_file_on_disk(tmp_path):
    tensors = [torch.arange(1 << 18), torch.rand(3, 5)]
    with ChecksummedFile(tmp_path, "a/b.bin") as file:
        starts = []
        for tensor in tensors:
            starts.append(file.tell())
            torch.save(tensor, file)
        file.write(memoryview(b"end"))
    data = (tmp_path / "a" / "b.bin").read_bytes()
    assert (file.record().size, file.record().crc32) == (len(data), f"{zlib.crc32(data):08x}")
    assert verify_files(tmp_path, [file.record()]) == []
    for start, stop, tensor in zip(starts, [*starts[1:], len(data) - 3], tensors, strict=True):
        assert torch.equal(torch.load(io.BytesIO(data[start:stop])), tensor)


def test_a_disk_that_takes_less_at_once_gets_all_of_it(tmp_path):
    with ChecksummedFile(tmp_path, "slow") as file:
        raw = file._file

        class TakesFive:
            def write(self, data):
                return raw.write(data[:5])

            fileno, close = raw.fileno, raw.close

        file._file = TakesFive()
        assert file.write(b"twelve bytes") == 12
    assert (tmp_path / "slow").read_bytes() == b"twelve bytes" and checksum_file(
        tmp_path / "slow"
    ) == file.record().crc32


def test_a_file_that_cannot_be_finished_is_closed_and_told(tmp_path):
    with pytest.raises(OSError, match="full"), ChecksummedFile(tmp_path, "x") as file:
        raise OSError("full")
    assert file._file.closed


def test_small_files_are_recorded_too(tmp_path):
    assert verify_files(tmp_path, [write_file(tmp_path, "state/own.0", b"mine")]) == []


def test_a_full_disk_under_a_tensor_is_told_as_a_full_disk(tmp_path):
    """torch's writer of tensors would complain of a position that it did not expect."""
    with pytest.raises(OSError, match="No space left"), ChecksummedFile(tmp_path, "x") as file:
        raw = file._file

        class Full:
            room = 3000

            def write(self, data):
                if not self.room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written, self.room = raw.write(data[: self.room]), max(0, self.room - len(data))
                return written

            fileno, close = raw.fileno, raw.close

        file._file = Full()
        torch.save(torch.rand(1 << 12), file)
