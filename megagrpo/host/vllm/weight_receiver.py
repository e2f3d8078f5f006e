"""What of ours runs in vLLM's workers: taking weights from buckets. vLLM adds `WeightReceiver`'s methods to
its worker class.

Weights are copied into the live parameters, a bucket at a time: nothing is staged, nothing is held twice.
"""

import zlib
from typing import Any

import torch
from vllm.platforms import current_platform

from megagrpo.host.vllm import transfer
from megagrpo.host.vllm.reload import LayerwiseReload
from megagrpo.wire.bucket_manifest import BucketError, BucketManifest, build_ack, open_tensors
from megagrpo.wire.held_version import HeldVersion

if current_platform.is_cpu():
    from megagrpo.host.vllm import cpu_fixes

    cpu_fixes.apply_fixes()

transfer.register()


class WeightReceiver:
    """Methods of a vLLM worker, called on all of them through its `collective_rpc`.

    A mistake of the sender's is answered, not raised: what a worker raises ends the whole server. Every
    answer is a JSON object, either {"error": text} or what the method says.
    """

    def receive_bucket(self, manifest_json: str) -> dict[str, Any]:
        """Verify a whole bucket, then load it; the acknowledgement of `manifest.build_ack`."""
        try:
            manifest = BucketManifest.from_json(manifest_json)
            return self._load(manifest)
        except Exception as error:  # what a worker raises ends the server
            return _describe(error)

    def load_received(self) -> dict[str, Any]:
        """Verify and load the bucket that the last `/update_weights` received; the acknowledgement of
        `manifest.build_ack`.
        """
        try:
            return self._load(*self.weight_transfer_engine.take())
        except Exception as error:  # what a worker raises ends the server
            return _describe(error)

    def describe_transfer(self) -> dict[str, Any]:
        """Say how the last step of a weight transfer went: {"rank", "is_open": between start and finish},
        and "error" if it failed.
        """
        answer = {"rank": self.rank, "is_open": self._weight_update_active}
        try:
            self.weight_transfer_engine.raise_error()
            return answer
        except Exception as error:  # what a worker raises ends the server
            return answer | _describe(error)

    def commit_weights(self, version: str) -> dict[str, Any]:
        """Check that every parameter got its weights, and renew what is computed from them: {"rank",
        "version"}.
        """
        try:
            self._finish_reload()
            of_version, loaded = self._update_in_progress()
            parameters = {name for name, _ in self._model().named_parameters()}
            if of_version != int(version) or (missing := sorted(parameters - loaded)):
                lacks = (
                    f"{len(missing)} parameters got no weights: {', '.join(missing[:5])}"
                    if of_version == int(version)
                    else "none came"
                )
                raise BucketError(f"weight version {version}: {lacks}")
            if current_platform.is_cpu():
                cpu_fixes.pack_weights(self._model())
            self._held.commit(int(version))
            self._weight_update = None
            return {"rank": self.rank, "version": int(version)}
        except Exception as error:  # what a worker raises ends the server
            return _describe(error)

    def describe_parameters(self) -> dict[str, Any]:
        """Return this worker's parameters: {"rank", "parameters": {name: {"dtype", "shape"}}}; tied ones
        once.
        """
        parameters = {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in self._model().named_parameters()
        }
        return {"rank": self.rank, "parameters": parameters}

    def checksum_parameters(self) -> dict[str, Any]:
        """Return the CRC-32 of this worker's parameters: {"rank", "checksums": {name: eight hexadecimal
        digits}}.
        """
        checksums = {}
        for name, tensor in self._model().named_parameters():
            plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            checksums[name] = f"{zlib.crc32(plain.numpy()):08x}"
        return {"rank": self.rank, "checksums": checksums}

    def _load(self, manifest: BucketManifest, memory: torch.Tensor | None = None) -> dict[str, Any]:
        self._held.check(manifest)
        current = dict(self._model().named_parameters()) if manifest.layout == "sharded" else None
        # all are verified before the first is loaded
        tensors = list(open_tensors(manifest, self.rank, current, memory))
        self._held.begin(manifest.version)
        loaded = (
            self._load_full(manifest.version, tensors)
            if manifest.layout == "full"
            else self._write_slices(tensors)
        )
        if manifest.base is not None:
            # what did not come is what it was
            loaded = {name for name, _ in self._model().named_parameters()}
        self._note_loaded(manifest.version, loaded)
        return build_ack(manifest, self.rank)

    def _model(self) -> torch.nn.Module:
        return self.model_runner.get_model()

    @property
    def _held(self) -> HeldVersion:
        self.__dict__.setdefault("_held_version", HeldVersion())
        return self._held_version

    def _update_in_progress(self) -> tuple[int | None, set[str]]:
        return getattr(self, "_weight_update", None) or (None, set())

    def _note_loaded(self, version: int, names: Any) -> None:
        of_version, loaded = self._update_in_progress()
        self._weight_update = (version, (loaded if of_version == version else set()) | set(names))

    def _load_full(self, version: int, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        """Let the model's loader take full tensors; return the names of the parameters that they are for."""
        if self.vllm_config.quant_config is None:
            return self._model().load_weights(tensors)
        reload: LayerwiseReload | None = getattr(self, "_reload", None)
        if reload is None or not reload.takes(version, {name for name, _ in tensors}):
            self._finish_reload()
            self._reload = LayerwiseReload(self, version)
        return self._reload.load(tensors)

    def _finish_reload(self) -> None:
        if reload := getattr(self, "_reload", None):
            self._reload = None
            reload.finish()

    @torch.no_grad()
    def _write_slices(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy tensors that are this worker's own slices into its parameters."""
        parameters = dict(self._model().named_parameters())
        for name, tensor in tensors:
            if name not in parameters:
                raise BucketError(f"weight {name!r}: engine rank {self.rank} has no such parameter")
            if parameters[name].shape != tensor.shape:
                raise BucketError(
                    f"weight {name!r}: shape {tuple(tensor.shape)}, that of engine rank {self.rank} is "
                    f"{tuple(parameters[name].shape)}"
                )
        for name, tensor in tensors:
            parameters[name].copy_(tensor)
        return {name for name, _ in tensors}


def _describe(error: Exception) -> dict[str, Any]:
    text = " ".join(str(error).split())
    return {"error": text if isinstance(error, BucketError) else f"{type(error).__name__}: {text}"}
