"""Faults of engines that are servers: real ones, of `make engines`."""

from chains import Case, Chain

VLLM = ".engines/vllm/bin/python"
SERVER = [
    "engine.name=vllm",
    "engine.server.request_timeout_seconds=10",
    "engine.sleep_while_training=true",
    "engine.server.sleep_keeps_weights=true",
    "weights.delta=true",
    "watchdog.floor_seconds=300",
]
KILLED = "the server was killed by SIGKILL"


def server(action, point, step, rank=0, **more):
    return {"point": point, "action": action, "step": step, "rank": rank, **more}


def goes_on(name, *faults, says, overrides=()):
    return Case(name, "goes on", faults, says=says, overrides=overrides)


def lost(replica, why, version=r"\d+"):
    return rf"warning: weight version {version}: engine replica {replica} is lost: [^\n]*{why}"


def two_servers(first_step):
    """Two servers, each of which is killed once; the second one can only be spared if the first one has
    come back.
    """
    away, back, alone = first_step, first_step + 1, first_step + 2
    return [
        goes_on(
            "one of two killed with requests on their way: started anew, and back in the next step",
            server("kill_server_soon", "requests.enter", away, rank=1),
            server("await_server", "update.enter", back, rank=1),
            says=rf"(?s)replica 1 is lost: .*weight version {back}: engine replica 1 was restarted and "
            r"generates again",
            overrides=["engine.server.replicas=2"],
        ),
        goes_on(
            "the other one killed in a publish: the one that came back is given everything, and generates "
            "alone",
            server("kill_server", "bucket.leave", alone),
            says=lost(0, KILLED, alone),
        ),
    ]


# One server for both ranks: nothing else is left when it dies, so the ranks wait until it is back.
ALONE = [
    goes_on(
        "the only server killed with requests on their way",
        server("kill_server_soon", "requests.enter", 1),
        says=lost(0, KILLED, 0),
    ),
    goes_on(
        "its workers killed in a publish",
        server("kill_server_workers", "bucket.enter", 2),
        says=lost(0, "", 2),
    ),
    goes_on(
        "killed before a commit", server("kill_server", "server_commit.enter", 3), says=lost(0, KILLED, 3)
    ),
    goes_on(
        "frozen while it generates, and killed while it is started anew",
        server("freeze_server", "requests.enter", 4),
        server("kill_server", "server_start.enter", 4),
        says=lost(0, "was answered within engine.server.request_timeout_seconds = 10", 3),
    ),
    Case(
        "killed when no restart is left",
        "resumes",
        [server("kill_server_soon", "requests.enter", 5)],
        says=rf"no rollout engine is left: replica 0: {KILLED}[^\n]*; engine.server.max_restarts = 5 "
        rf"are used up",
        overrides=["engine.server.max_restarts=5"],
    ),
]

ENGINES = Chain(
    "engines",
    2,
    ["parallel.tp=2", *SERVER],
    [
        ALONE,
        [
            Case(
                "killed in a publish when no restart is left: the trained step is saved",
                "resumes",
                [server("kill_server", "bucket.enter", 6)],
                says=r"(?s)rank \d failed in step 7, phase rollout: .*no rollout engine is left: replica 0: "
                r".*are used up",
                overrides=["engine.server.max_restarts=0"],
            )
        ],
        [
            Case(
                "the owner killed while its server generates",
                "resumes",
                [server("die_soon", "requests.enter", 8)],
                says="rank 0 died in step 8, phase rollout",
            )
        ],
        [
            Case(
                "killed while it loads",
                "refuses",
                [server("kill_server", "server_start.enter", None)],
                says="engine.name: vllm: the server ended with code -9 while it started",
            )
        ],
        [
            goes_on("its port taken meanwhile", server("take_port", "port.leave", None, rank=1), says=""),
            *two_servers(9),
            goes_on(
                "one of two killed when the other one serves the new weights already: that one is given "
                "them again",
                server("await_server", "update.enter", 12),
                server("kill_server", "server_serve.enter", 13, rank=1),
                says=rf"(?s)weight version 12: engine replica 0 was restarted.*{lost(1, KILLED, 13)}",
            ),
            Case(
                "SIGTERM while one of two is away",
                "stops",
                [server("term", "requests.enter", 14)],
                says="stopped by SIGTERM after step 13",
            ),
        ],
    ],
    needs=VLLM,
    seconds=600.0,
)

SHORT_ENGINES = Chain(
    "short engines", 2, ["parallel.tp=2", *SERVER], [two_servers(1)], needs=VLLM, seconds=300.0
)

# Servers whose ranks are members of a process group with the trainer's, which is made anew after each of
# these.
BY_GROUP = [option for option in SERVER if not option.startswith("weights.delta")] + [
    "weights.transport.kind=group"
]
GROUPS = Chain(
    "groups",
    2,
    ["parallel.tp=2", *BY_GROUP],
    [
        [
            goes_on(
                "group: killed in a publish",
                server("kill_server", "bucket.enter", 1),
                says=lost(0, KILLED, 1),
            ),
            goes_on(
                "group: its workers killed in a publish",
                server("kill_server_workers", "bucket.enter", 2),
                says=lost(0, "", 2),
            ),
            goes_on(
                "group: frozen in a publish", server("freeze_server", "bucket.enter", 3), says=lost(0, "", 3)
            ),
        ],
    ],
    needs=VLLM,
    seconds=600.0,
)
