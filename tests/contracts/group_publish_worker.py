"""Worker: two trainer ranks (TP 2) publish to a real server through a process group with it, in both layouts,
and with faults.

Arguments: engine, its address, HF folder, its tensor parallel size, layouts. The references are the
    checkpoint's tensors in another place:
what the server's own loader makes of them when it gets them through shared memory, and teacher-forced float32
transformers.
"""

import sys
import time
from pathlib import Path

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bucket_files import load  # noqa: E402
from checkpoint_of_model import checkpoint_of  # noqa: E402
from engine_contract import assert_logprobs_match, params  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from megagrpo.config.engine_sections import build_engine_config  # noqa: E402
from megagrpo.engines import ENGINES  # noqa: E402
from megagrpo.engines.base import EngineError  # noqa: E402
from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.load_stage import load_stage_model  # noqa: E402
from megagrpo.models.precision import build_precision  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.parallel.groups import build_groups, destroy_groups  # noqa: E402
from megagrpo.parallel.layout import ParallelLayout  # noqa: E402
from megagrpo.types import Prompt  # noqa: E402
from megagrpo.weights.export import WeightExporter  # noqa: E402
from megagrpo.weights.from_config import build_transport  # noqa: E402
from megagrpo.weights.plan.targets import EngineGrid  # noqa: E402
from megagrpo.weights.publisher import PublishError, agree  # noqa: E402
from megagrpo.weights.remote_publisher import RemotePublisher  # noqa: E402

BUCKET_BYTES = 8_000  # several buckets
TIMEOUT_SECONDS = 3.0


class Case:
    """The trainer's model, this rank's view of the engine, and a publisher in each layout."""

    def __init__(self, name: str, address: str, folder: str, tensor_parallel: int):
        self.groups = build_groups(ParallelLayout(2, tp=2), timeout_seconds=120)
        hf = read_hf_config(Path(folder))
        config = build_transformer_config(
            hf, self.groups, build_precision("fp32"), sp=hf.num_experts is not None
        )
        self.model = load_stage_model(folder, hf, config, self.groups, DEVICE, use_te=False)
        self.reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        settings = build_engine_config(
            name=name,
            server={
                "addresses": (address,),
                "tensor_parallel": tensor_parallel,
                "request_timeout_seconds": 60,
            },
        )
        self.engine = ENGINES.get(name)(folder, settings, is_owner=self.groups.rank == 0)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = [
            Prompt(i, text, tuple(tokenizer(text)["input_ids"]))
            for i, text in enumerate(("1+2=", "hello there, you"))
        ]
        self.version = 0

    def publisher(self, layout: str) -> RemotePublisher:
        grid = EngineGrid(1, self.engine.engine_ranks, 1, layout)
        transport = build_transport(
            "group", self.model, grid, [0], torch.float32, BUCKET_BYTES, TIMEOUT_SECONDS
        )
        return RemotePublisher(WeightExporter(self.model), self.engine, 0, transport)

    def publish(self, publisher: RemotePublisher) -> dict[str, float]:
        self.version += 1
        return publisher.publish(self.version).metrics

    def overwrite(self, factor: float) -> list[dict[str, str]]:
        """Bring other weights to the server by shared memory, so that nothing is left of what was there;
        return its checksums.
        """
        self.version += 1
        other = AutoModelForCausalLM.from_pretrained(self.engine.protocol.model.folder, dtype=torch.float32)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(factor)
        self.engine.begin_update(self.version)
        load(self.engine, checkpoint_of(other).items())
        self.engine.commit_update(self.version)
        return self.checksums()

    def checksums(self) -> list[dict[str, str]]:
        return agree(
            lambda: self.engine.parameter_checksums() if self.engine.is_owner else None, "checksums"
        )[0]

    def check_serves(self) -> None:
        """The owner samples; what comes has the log-probs of the trainer's weights."""
        if self.engine.is_owner:
            assert_logprobs_match(
                self.reference, self.prompts, self.engine.generate(self.prompts, params(), range(2))
            )
        dist.barrier()

    def fails_with(self, publisher: RemotePublisher, *words: str) -> None:
        """A publish fails in time, for this reason on both ranks, and what serves afterwards is whole, or
        nothing is.
        """
        started = time.monotonic()
        try:
            self.publish(publisher)
        except PublishError as error:
            assert all(word in str(error) for word in words), f"{words} not in: {error}"
        else:
            raise AssertionError(f"{words}: nothing was raised")
        assert time.monotonic() - started < 5 * TIMEOUT_SECONDS
        if self.engine.is_owner:
            try:
                self.engine.generate(self.prompts, params(), range(1))
            except EngineError as error:
                assert "stale" in str(error)
            else:
                self.check_serves()
        dist.barrier()


def main() -> None:
    name, address, folder, tensor_parallel, *layouts = sys.argv[1:]
    case = Case(name, address, folder, int(tensor_parallel))
    rank = case.groups.rank
    loaded = case.overwrite(1.0)
    for layout in layouts:
        publisher = case.publisher(layout)
        assert case.overwrite(0.8) != loaded
        metrics = case.publish(publisher)
        assert (
            metrics["publish/kept_ratio"] == 1.0
            and metrics["publish/sent_bytes"] == metrics["publish/written_bytes"]
        ), metrics
        assert metrics["publish/peak_bytes"] <= 2 * max(
            bucket.nbytes for bucket in publisher.transport.plan.buckets
        )
        assert case.checksums() == loaded
        case.check_serves()
        joined = case.engine.transfer_group
        case.publish(publisher)  # through the same group
        assert case.engine.transfer_group == joined

    transport = publisher.transport
    pack, send = transport._pack, transport._send
    if rank == 1:
        transport._pack = lambda transfers, reader: pack(transfers, reader) + 1
    case.fails_with(publisher, "checksum", "the sender's is")
    transport._pack = pack
    case.publish(publisher)  # a new group
    case.check_serves()

    norm = next(
        parameter
        for parameter_name, parameter in case.model.chunks[0].named_parameters()
        if "layernorm" in parameter_name
    )
    kept = norm.detach().clone()
    norm.data[0] = float("nan")
    case.fails_with(publisher, "not finite")
    norm.data.copy_(kept)

    if rank == 1:
        transport._send = lambda bucket, slot: None
    case.fails_with(publisher, "trainer rank 1 sent nothing", "Timed out")
    transport._send = send
    case.publish(publisher)
    assert case.checksums() == loaded
    case.check_serves()
    publisher.close()
    case.engine.close()
    destroy_groups()
    print(f"GROUP OK {name}\n", end="")  # one write: that of the other rank can't come into it


if __name__ == "__main__":
    main()
