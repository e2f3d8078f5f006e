"""Publishing to engines in processes of their own: buckets of slices, acknowledged one by one, as one
transaction.

    begin - for each bucket: select - write - checksums - hand over (while the next one is written) -
    acknowledged - complete - probe - serve

Before every next step all ranks know that the last one went well on all of them: a failure ends the publish
on every rank alike.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from megagrpo.engines.base import EngineError
from megagrpo.engines.bucket_engine import BucketEngine
from megagrpo.engines.server.http_client import EngineUnreachable
from megagrpo.telemetry.activity import Counts, count_nothing
from megagrpo.weights.acknowledgements import describe_difference
from megagrpo.weights.context import PublishContext
from megagrpo.weights.export import WeightExporter
from megagrpo.weights.publisher import Publisher, PublishError, PublishStats, Stages, agree
from megagrpo.weights.selection.base import Everything, Selection
from megagrpo.weights.transports.base import SLOTS, Transport


class RemotePublisher(Publisher):
    """Publishes what a selection chooses through a transport.

    Args:
        exporter: of the same model, for exports.
        engine: this rank's view of its replica.
        replica: its number.
        transport: how weights get there.
        select: builds the selection (what of the weights is sent) for a transport's plan.
        sharded: the same in layout `sharded`, where `transport` is `full`: taken from the second publish on
            if the first one shows that it would bring the engine's loader's result, bit for bit.
        requires_sharded: raise where it would not; else `full` stays, with a note and a count.
        counts: told of each bucket that is written.
        probe: called with (version, replicas) before the version serves; raises where engine and trainer
            disagree. Collective.
    """

    def __init__(
        self,
        exporter: WeightExporter,
        engine: BucketEngine,
        replica: int,
        transport: Transport,
        select: Callable[[PublishContext], Selection] = Everything,
        probe: Callable[[int, Collection[int]], dict[str, float]] | None = None,
        sharded: Transport | None = None,
        requires_sharded: bool = False,
        counts: Counts = count_nothing,
    ):
        self.exporter, self.engine, self.replica, self.transport, self.probe = (
            exporter,
            engine,
            replica,
            transport,
            probe,
        )
        self._sharded, self._requires_sharded = sharded, requires_sharded
        self._select, self.selection = select, select(transport.context)
        self._fallbacks, self._counts = 0, counts

    def publish(self, version: int, replicas: Collection[int] | None = None) -> PublishStats:
        """Bring the engines to `version`; see Publisher.publish."""
        transport = self.transport  # another one may take its place below
        chosen = sorted(range(transport.plan.grid.replicas) if replicas is None else replicas)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="publish") as hand_over:
                stats = self._transfer(version, chosen, hand_over)
            notes = self._try_sharded(version, chosen) if self._sharded else ()
        except BaseException:
            self.selection.abort()
            if self.replica in chosen:
                # a dead engine can't be told, and is empty when it is started anew
                with suppress(EngineError):
                    self.engine.abort_update()
            raise
        finally:
            transport.close()
        return replace(
            stats, metrics=stats.metrics | {"publish/full_fallbacks": self._fallbacks}, notes=tuple(notes)
        )

    def _try_sharded(self, version: int, chosen: list[int]) -> list[str]:
        """Compare the slices that layout `sharded` would send with the parameters that the engines' loaders
        made of the full tensors; switch to `sharded` if they are equal.
        """
        assert self._sharded is not None
        candidate = self._sharded
        what = f"weight version {version}: layout sharded"
        problems = []
        try:
            is_asked = self.engine.is_owner and self.replica in chosen
            kept = agree(lambda: self._own_checksums() if is_asked else None, what)[candidate.rank]
            everything = Everything(candidate.context)
            everything.open(chosen)
            agree(lambda: candidate.open(version, chosen), what)
            agree(candidate.attach, what)
            expected: dict[tuple[int, str], str] = {}
            for bucket, layout in enumerate(candidate.context.layouts):
                agree(lambda bucket=bucket: candidate.write(everything.select(bucket), 0), what)
                for part in agree(lambda: candidate.checksums(0), what):
                    for (replica, number), checksum in part.items():
                        if replica == self.replica:
                            expected[
                                layout.tensors[number].destination, layout.tensors[number].target.name
                            ] = checksum
            mine = describe_difference(expected, kept) if is_asked else None
            problems = [problem for problem in agree(lambda: mine, what) if problem]
        finally:
            candidate.close()
        self._sharded = None
        if not problems:
            self.transport.end()
            self.transport, self.selection = candidate, self._select(candidate.context)
            return [f"{what}: equal to what the engine's loader made, bit for bit; used from now on"]
        if self._requires_sharded:
            raise PublishError(f"weights.layout: sharded: {problems[0]}")
        self._fallbacks = 1
        return [f"warning: {what}: not used, full tensors are sent: {problems[0]}"]

    def _transfer(self, version: int, chosen: list[int], hand_over: ThreadPoolExecutor) -> PublishStats:
        transport, stages, takes_part = self.transport, Stages(), self.replica in chosen
        base = self._base_version(version, chosen)
        agree(lambda: self._begin(version, chosen, base), f"weight version {version}: begin")
        agree(transport.attach, f"weight version {version}: attach")
        agree(lambda: transport.connect(self.engine), f"weight version {version}: connect")
        pending: Future[int] | None = None
        acknowledged = 0
        for bucket in range(len(transport.plan.buckets)):
            slot = bucket % SLOTS
            self._counts("buckets", bucket, len(transport.plan.buckets))
            with stages.stage("write"):
                agree(
                    lambda bucket=bucket, slot=slot: transport.write(self.selection.select(bucket), slot),
                    f"weight version {version}: bucket {bucket}",
                )
            with stages.stage("checksum_and_wait"):
                # The other slot is free once the bucket before is acknowledged; all ranks must know before
                # they write there.
                def check(slot: int = slot, pending: Future[int] | None = pending) -> tuple[dict, int]:
                    return transport.checksums(slot), self._finish(pending)

                found = agree(check, f"weight version {version}")
                acknowledged += sum(count for _, count in found)
            checksums = {key: checksum for part, _ in found for key, checksum in part.items()}
            transport.deliver(slot)
            pending = (
                hand_over.submit(self._hand_over, bucket, slot, checksums, stages) if takes_part else None
            )
        with stages.stage("checksum_and_wait"):
            acknowledged += sum(agree(lambda: self._finish(pending), f"weight version {version}"))
        with stages.stage("commit"):
            self._owners_first(self.engine.complete_update, version, takes_part, "commit")
        with stages.stage("probe"):
            probed = self.probe(version, chosen) if self.probe else {}
        with stages.stage("serve"):
            self._owners_first(self.engine.serve_update, version, takes_part, "serve")
        transport.committed(version)
        self.selection.commit(version)
        return self._sum_up(version, len(chosen), acknowledged, stages, probed)

    def _owners_first(self, step: Callable[[int], None], version: int, takes_part: bool, what: str) -> None:
        """Take a step on owners first, then on followers: a follower must not record a step that its owner
        failed at. Collective.
        """
        for is_owner in (True, False):
            takes_it = takes_part and self.engine.is_owner == is_owner
            agree(
                lambda takes_it=takes_it: step(version) if takes_it else None,
                f"weight version {version}: {what}",
            )

    def _finish(self, pending: Future[int] | None) -> int:
        """Wait for the bucket that is on its way; return the bytes that this rank's engine acknowledged."""
        acknowledged = pending.result() if pending else 0
        self.transport.wait_delivered()
        return acknowledged

    def _own_checksums(self) -> list[dict[str, str]] | str:
        """Return what the engine says of its parameters, or why it says nothing."""
        try:
            return self.engine.parameter_checksums()
        except EngineUnreachable:
            raise  # it is dead, which says nothing of the layouts
        except EngineError as error:
            return str(error)

    def _base_version(self, version: int, chosen: list[int]) -> int | None:
        """Return the version that all chosen engines hold, if changes to it are known; None: they get
        everything. Collective then.
        """
        base = self.selection.base_version
        if base is None:
            return None
        held = agree(
            lambda: self.engine.weight_version if self.replica in chosen else base,
            f"weight version {version}: begin",
        )
        return base if all(one == base for one in held) else None

    def _begin(self, version: int, chosen: list[int], base_version: int | None) -> None:
        if self.replica in chosen:
            self.engine.begin_update(version)
        self.selection.open(chosen, base_version)
        self.transport.open(version, chosen)

    def _hand_over(
        self, bucket: int, slot: int, checksums: dict[tuple[int, int], str], stages: Stages
    ) -> int:
        """Give a complete bucket to this rank's engine, while the next is written; return the bytes that
        its ranks acknowledged.
        """
        layout = self.transport.context.layouts[bucket]
        own = [checksums[self.replica, number] for number in range(len(layout.tensors))]
        manifest = self.transport.manifest(slot, self.replica, own)
        if not self.engine.is_owner:
            self.engine.receive(manifest)
            return 0
        with stages.stage("load"):
            acks = self.engine.receive(manifest)
        return sum(ack["bytes"] for ack in acks)

    def _sum_up(
        self, version: int, num_replicas: int, acknowledged: int, stages: Stages, metrics: dict[str, float]
    ) -> PublishStats:
        """Add the ranks' numbers up. Collective."""
        plan, stats = self.transport.plan, self.transport.stats
        rows = agree(
            lambda: (
                stats.written_bytes,
                stats.sent_bytes,
                stats.peak_bytes,
                stages.seconds,
                stats.planned_bytes,
            ),
            "weights: numbers",
        )
        written = sum(row[0] for row in rows)
        kept = sum(plan.target_bytes(target) for targets in plan.targets for target in targets) * num_replicas
        # under `full` every rank reads all of it
        readers = 1 if plan.grid.layout == "sharded" else self.engine.engine_ranks
        metrics = metrics | {
            "publish/written_bytes": written,
            "publish/written_share": written / max(sum(row[4] for row in rows), 1),
            "publish/sent_bytes": sum(row[1] for row in rows),
            "publish/acknowledged_bytes": acknowledged,
            "publish/kept_ratio": acknowledged / (kept * readers),
            "publish/peak_bytes": max(row[2] for row in rows),
            "publish/buckets": len(plan.buckets),
        }
        measured = sorted({name for row in rows for name in row[3]})
        metrics |= {
            f"publish/{name}_seconds": max(row[3].get(name, 0.0) for row in rows) for name in measured
        }
        return PublishStats(version, acknowledged if self.engine.is_owner else 0, acknowledged, metrics)

    def close(self) -> None:
        """End the transports: groups are left, threads end."""
        for transport in (self.transport, self._sharded):
            if transport is not None:
                transport.end()
