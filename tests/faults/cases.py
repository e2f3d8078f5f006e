"""The faults."""

from answer_cases import ANSWERS, ANSWERS_OF_TWO
from chains import Case, Chain, kept
from engine_cases import ENGINES, GROUPS
from outside_cases import ATTACKS
from storage_cases import FOLDERS, SAVES

LAST = 1  # the last rank of two
# a stall is found soon; the smallest phases take tenths of a second, on a busy machine a few seconds
SOON = ["watchdog.floor_seconds=8"]


def at(point, action, step=None, rank=LAST, **more):
    """What is done at a point; `never=True`: the run must have ended before it comes there."""
    return {"point": point, "action": action, "step": step, "rank": rank, **more}


def killed(name, point, step, rank=LAST, **more):
    return [
        Case(
            name,
            "resumes",
            [at(point, "kill", step, rank, **more)],
            says=r"rank \d died in "
            r"(step|phase)",
        )
    ]


def raises(name, point, step, rank=LAST, action="raise", error="RuntimeError: injected"):
    return [
        Case(
            name,
            "resumes",
            [at(point, action, step, rank)],
            says=rf"rank {rank} failed in step "
            rf"{step}, phase \w+: {error}",
        )
    ]


def stopped(name, point, step, action, rank=LAST, says="", more=(), **where):
    says = f"stopped by SIG.*; {says}the same command goes on from there"
    return [Case(name, "stops", [at(point, action, step, rank, **where), *more], says)]


def stopped_while_decoding(name, step, action, skip=0):
    """The pass that the stop comes in takes long enough for it to reach both ranks; on any of them the
    next pass is an error.
    """
    slow, next_pass = (
        at("decode.enter", "slow", step, None, skip=skip),
        at("decode.enter", "raise", step, None, skip=skip + 1, never=True),
    )
    return stopped(name, "decode.enter", step, action, more=[slow, next_pass], skip=skip)


KILLS = Chain(
    "tp2",
    2,
    ["parallel.tp=2"],
    [
        killed("killed while the groups are built", "groups.enter", None),
        killed("killed before the first rollout", "rollout.enter", 1),
        killed("killed while it generates", "generate.enter", 2),
        killed("the other rank killed while it generates", "generate.leave", 3, rank=0),
        killed("killed while it scores", "score.enter", 4),
        killed("killed before the tokens are exchanged", "exchange.enter", 5),
        killed("killed before the backward pass", "forward_backward.enter", 6),
        killed("killed before the weights are updated", "apply.enter", 7),
        killed("killed after the weights are updated", "apply.leave", 8),
        killed("killed while the engine loads weights", "load_weights.enter", 9),
        killed("killed before the engine commits", "commit_weights.enter", 10, rank=0),
        killed("killed before a save", "checkpoint.enter", 11),
        killed("killed after a save", "checkpoint.leave", 12),
    ],
)

ERRORS = Chain(
    "dp2",
    2,
    ["update.mini_batches_per_step=2"],
    [
        raises("an error in the engine", "generate.enter", 1),
        raises("an error on the other rank while its peer waits", "exchange.enter", 2, rank=0),
        raises("an error between two updates", "apply.leave", 3),
        raises("an error while the engine loads weights", "load_weights.enter", 4, rank=0),
        raises(
            "out of memory in the backward pass",
            "forward_backward.enter",
            5,
            action="out_of_memory",
            error="MemoryError: injected",
        ),
        [
            Case(
                "a user's mistake on one rank",
                "resumes",
                [at("update.enter", "user_error", 6)],
                says="(?m)^a mistake of the user's$",
            )
        ],
        [
            Case(
                "a crash in native code",
                "resumes",
                [at("generate.enter", "segfault", 7)],
                says="rank 1 died in step 7, phase rollout",
            )
        ],
        [
            Case(
                "an exit that says nothing",
                "resumes",
                [at("update.enter", "exit", 8)],
                says="rank 1 died in step 8, phase update",
            )
        ],
        [
            Case(
                "both ranks fail at once",
                "resumes",
                [at("update.enter", "raise", 9, rank=None)],
                says=r"rank \d failed in step 9, phase update: RuntimeError: injected",
            )
        ],
    ],
)

SIGNALS = Chain(
    "signals",
    2,
    # What is found again was saved by the stop alone. Two mini-batches: the log-probs before the update take
    # a pass of their own.
    ["parallel.pp=2", "checkpoint.every=100", "evaluation.every=4", "update.mini_batches_per_step=2"],
    [
        stopped_while_decoding("SIGTERM in the first evaluation", None, "term"),
        stopped_while_decoding("SIGTERM while it generates", 1, "term", skip=2),
        stopped(
            "SIGUSR1 in the pass before the backward pass",
            "logprobs.enter",
            2,
            "usr1",
            rank=0,
            says="step 2 was given up; ",
            more=[at("forward_backward.enter", "raise", 2, None, never=True)],
        ),
        stopped(
            "SIGUSR1 in the first backward pass",
            "forward_backward.enter",
            3,
            "usr1",
            rank=0,
            says="step 3 was given up; ",
        ),
        stopped("SIGTERM while a finished step is evaluated", "evaluate.enter", 4, "term"),
        stopped("SIGTERM on both ranks after an update", "apply.leave", 5, "term", rank=None),
        stopped("Ctrl-C while the engine loads weights", "load_weights.enter", 6, "interrupt"),
        [
            Case(
                "Ctrl-C twice",
                "resumes",
                [at("update.enter", "interrupt_twice", 7)],
                says="interrupted twice: left at once, without saving",
            )
        ],
    ],
)

STALLS = Chain(
    "stalls",
    2,
    ["parallel.tp=2"],
    [
        [
            Case(
                "a rank is frozen while it updates",
                "resumes",
                [at("forward_backward.enter", "freeze", 3)],
                says=r"(?s)rank 0 stalled in step 3, phase update: no progress.*without an answer .*: rank 1",
                overrides=SOON,
            )
        ],
        [
            Case(
                "a rank hangs in Python",
                "resumes",
                [at("generate.enter", "hang", 6)],
                says=r"rank \d stalled in step 6, phase rollout: no progress",
                overrides=SOON,
            )
        ],
        [
            Case(
                "a rank spins",
                "resumes",
                [at("publish.enter", "spin", 9)],
                says=r"rank \d stalled in step 9, phase publish: no progress",
                overrides=SOON,
            )
        ],
    ],
)

SHORT = Chain(
    "short",
    2,
    ["parallel.tp=2"],
    [
        killed("killed while it generates", "generate.enter", 1),
        killed("killed after the weights are updated", "apply.leave", 2, rank=0),
        killed("killed before a save", "checkpoint.enter", 3),
        raises("an error while its peer waits", "exchange.enter", 4, rank=0),
        stopped_while_decoding("SIGTERM while it generates", 5, "term", skip=2),
        STALLS.launches[1],
    ],
)

FOUR = Chain(
    "tp2pp2",
    4,
    ["parallel.tp=2", "parallel.pp=2"],
    [
        killed("killed in the backward pass", "forward_backward.enter", 1, rank=3),
        raises("an error in the first stage", "apply.enter", 2, rank=0),
        stopped("SIGUSR1 on a rank of the first stage", "exchange.enter", 3, "usr1", rank=1),
        [
            Case(
                "a rank is frozen while its peers wait",
                "resumes",
                [at("exchange.enter", "freeze", 6, rank=2)],
                says=r"(?s)rank \d stalled in step 6, phase \w+: no progress.*without an answer .*: rank 2",
                overrides=SOON,
            )
        ],
    ],
)


def raises_in_a_save(step, rank):
    """Another rank's storage takes seconds for its part of the last save, which is kept all the same."""
    slow = [at("files.open", "slow", each, 0 if rank == LAST else LAST) for each in (step - 1, step)]
    who = "both ranks" if rank is None else f"rank {rank} alone"
    return [
        Case(
            f"an error on {who} while rank {slow[0]['rank']} still writes the last save",
            "resumes",
            [at("exchange.enter", "raise", step, rank), *slow],
            says=rf"rank {r'[01]' if rank is None else rank} failed in step {step}, phase \w+: RuntimeError",
            leaves=kept(step - 1),
        )
    ]


SHORT_BACKGROUND = Chain(
    "short background",
    2,
    ["checkpoint.asynchronous=true"],
    [raises_in_a_save(3, rank=0), raises_in_a_save(6, rank=1), raises_in_a_save(9, rank=None)],
)

BACKGROUND = Chain(
    "background",
    2,
    ["checkpoint.asynchronous=true"],
    [
        killed("killed while the last save is being written", "generate.enter", 3),
        stopped("SIGTERM while the last save is being written", "generate.enter", 5, "term"),
        raises("an error while the last save is being written", "exchange.enter", 7, rank=0),
        raises_in_a_save(10, rank=0),
        raises_in_a_save(13, rank=1),
        raises_in_a_save(16, rank=None),
    ],
)

AHEAD = Chain(
    "ahead",
    2,
    ["rollout.off_policy=one_step_off", "algorithm.correction.importance=token"],
    [
        killed("killed while it generates a step ahead", "generate.enter", 2),
        killed("killed with rollouts in flight", "apply.leave", 3, rank=0),
        stopped("SIGTERM with rollouts in flight", "forward_backward.enter", 4, "term"),
        raises("an error while it updates, with rollouts in flight", "apply.enter", 5),
    ],
)

LAUNCHERS = Chain(
    "launchers",
    2,
    ["parallel.tp=2"],
    [
        [
            Case(
                "megagrpo run: killed once",
                "restarts",
                [at("update.enter", "kill", 2)],
                says="rank 1 died in",
                launcher="megagrpo run",
            ),
            Case(
                "megagrpo run: SIGUSR1 after a restart",
                "stops",
                [at("generate.enter", "usr1_launcher", 4, only=1)],
                says="stopped by SIGUSR1 after step 3",
                launcher="megagrpo run",
                codes=[0],
            ),
        ],
        [
            Case(
                "torchrun: an error once",
                "restarts",
                [at("update.enter", "raise", 5)],
                says="rank 1 failed in",
                launcher="torchrun",
            ),
            Case(
                "torchrun: the launcher killed",
                "stops",
                [at("update.enter", "kill_launcher", 7, only=1)],
                says=r"stopped by the launcher's end after step [67]",
                launcher="torchrun",
                codes=[-9],
            ),
        ],
        [
            Case(
                "torchrun: SIGTERM",
                "stops",
                [at("generate.enter", "term_launcher", 9)],
                says="stopped by SIGTERM after step 8",
                launcher="torchrun",
                codes=[1],  # torchrun's own: all ranks have left with 0
            )
        ],
    ],
)

CHAINS = [
    *(KILLS, ERRORS, SIGNALS, STALLS, FOUR, BACKGROUND, AHEAD, SAVES, FOLDERS),
    *(LAUNCHERS, ATTACKS, ANSWERS, ANSWERS_OF_TWO, ENGINES, GROUPS),
]
