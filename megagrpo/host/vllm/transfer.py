"""Our backend of vLLM's weight transfer: what comes from the trainer's ranks through a process group.
Registered in vLLM's workers.

`/init_weight_transfer_engine` joins the group, `/start_weight_update` and `/finish_weight_update` enclose an
update, and each `/update_weights` receives a bucket. Those routes answer nothing of what happened in the
workers, and an exception in one of several would leave the others' answers to be taken for those of the next
call. So nothing is raised here: the bucket, or the error, is kept until `weight_receiver.WeightReceiver` asks
for it.
"""

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo

from megagrpo.wire.bucket_manifest import BucketError, BucketManifest
from megagrpo.wire.transfer_group import GroupAddress, TransferGroup

BACKEND = "megagrpo"


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """The bucket to receive."""

    manifest: str  # as JSON


class GroupReceiver(WeightTransferEngine[GroupAddress, BucketInfo]):
    """A worker's membership in the group, and what it received last."""

    init_info_cls, update_info_cls = GroupAddress, BucketInfo

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.group: TransferGroup | None = None
        self._received: tuple[BucketManifest, torch.Tensor] | None = None
        self._error: Exception | None = None

    def init_transfer_engine(self, init_info: GroupAddress) -> None:
        """Join the group, instead of the one before."""
        self.shutdown()
        self._error = None
        try:
            self.group = TransferGroup(
                init_info, init_info.rank_offset + self.parallel_config.rank, self.device
            )
        except Exception as error:  # what a worker raises ends the server
            self._error = error

    def start_weight_update(self) -> None:
        """Do nothing: weights are written in place."""

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Receive a bucket; nothing is loaded yet."""
        self._received, self._error = None, None
        try:
            manifest = BucketManifest.from_json(self.parse_update_info(update_info).manifest)
            if self.group is None:
                raise BucketError(
                    f"bucket of version {manifest.version}: this engine rank has joined no group"
                )
            self._received = manifest, self.group.receive(manifest)
        except Exception as error:  # what a worker raises ends the server
            self._error = error
            self.shutdown()  # the rest of the bucket, still in flight, would be read as the next one

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Do nothing: `update_weights` is replaced whole, with its wait for an accelerator."""

    def finish_weight_update(self) -> None:
        """Do nothing: `WeightReceiver.commit_weights` does it."""

    def shutdown(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.leave()
        self.group = None

    def take(self) -> tuple[BucketManifest, torch.Tensor]:
        """Return the bucket that was received last, and forget it. Raises the error of its receipt."""
        self.raise_error()
        if self._received is None:
            raise BucketError("no bucket was received")
        received, self._received = self._received, None
        return received

    def raise_error(self) -> None:
        """Raise the last error, if there was one."""
        if self._error is not None:
            raise self._error


def register() -> None:
    """Make the backend known to vLLM in this process."""
    WeightTransferEngineFactory.register_engine(BACKEND, GroupReceiver)
