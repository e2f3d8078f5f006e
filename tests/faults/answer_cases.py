"""Wrong answers of an engine's server: once, after which it answers rightly; for ever, which ends the run in
one line, with all steps saved that are trained; and for ever from one of two servers.
"""

from chains import Case, Chain, kept
from fake_engine import ACTIONS

ENGINE = [
    *(
        "engine.name=vllm",
        "engine.server.request_timeout_seconds=10",
        "engine.server.max_restarts=1",
        "watchdog.floor_seconds=120",
    ),
    # the answers are no model's: nothing of them can be compared with the actor's log-probs
    *("weights.layout=full", "weights.probe_tokens=0"),
    *("rollout.logprob_gap.stop_above_mean=null", "rollout.logprob_gap.warn_above=null"),
]
# What is told of each, behind server, prompt and completion
TOLD = {
    "null": "the answer = None: Input should be",
    "other fields": "choices = .*: Field required",
    "no completions": "0 completions came, 2 were asked for",
    "more tokens than asked": "45 tokens, at most 8 were asked for",
    "a version from the future": "weight version 1000 is none yet, the newest one is {version}",
    "no versions": "the weight versions of 0 of 5 tokens came",
    "a version of no tokens": "the weight versions of 1 of 5 tokens came",
    "an unknown finish reason": "finish reason 'banana' is none of stop, length, abort",
    "an id beyond the vocabulary": "token 0 has id 1000000, the vocabulary is 0 to",
    "an id as text": r"choices\.0\.token_ids\.0 = '7': Input should be a valid integer",
    "a positive log-prob": "the log-prob of token 0 is 0.5",
    "a log-prob that is no number": "the log-prob of token 0 is nan",
    "a log-prob too few": "5 tokens and 4 log-probs",
    "an empty completion": "no tokens, though it ended by 'stop'",
    "not JSON": "the answer is not JSON: expected value",
    "not UTF-8": "the answer is not JSON: invalid unicode",
    "nested too deep": "the answer is not JSON: recursion limit exceeded",
    "an error of the server": "answered 500: Internal Server Error: out of memory",
    "400 MB": r"the answer is larger than \d+ bytes, which what was asked for can't fill",
    "400 MB in a packed body": "the answer is ",
    "a dropped connection": "RemoteProtocolError",
    "a body that is cut off": "RemoteProtocolError",
    "silence": "was answered within engine.server.request_timeout_seconds = 10",
}
assert TOLD.keys() == ACTIONS.keys()
BROKEN = ("a dropped connection", "a body that is cut off")
GROWTH_MIB = 64.0  # of a rank's largest memory, over the undisturbed run's
WHERE = r"http://127\.0\.0\.1:\d+\S*:? .*"


def wrong(action, step, point="answer", times=1, server=0):
    return {"point": point, "action": action, "step": step, "times": times, "server": server}


def once(step, action):
    """The same request is asked again, and answered: by the client alone where the connection broke."""
    told = rf"warning: the engine of rank \d failed: {WHERE}{TOLD[action].format(version=step - 1)}"
    return Case(
        f"answered once with {action}",
        "goes on",
        [wrong(action, step)],
        says="" if action in BROKEN else told,
        growth_mib=GROWTH_MIB,
    )


def for_ever(action, step):
    told = TOLD[action].format(version=step - 1)
    return [
        Case(
            f"answered with {action} for ever",
            "resumes",
            [wrong(action, step, times=None)],
            says=rf"(?m)no rollout engine is left: replica 0: {WHERE}{told}.*max_restarts = 1 are used up",
            leaves=kept(step - 1),
            growth_mib=GROWTH_MIB,
        )
    ]


def in_a_publish(action, step, says, point="ack"):
    """What is trained is saved, though no engine has the weights."""
    return [
        Case(
            f"{'a bucket' if point == 'ack' else 'a commit'} answered with {action}",
            "resumes",
            [wrong(action, step, point, times=None)],
            says=says,
            leaves=kept(step),
            growth_mib=3 * GROWTH_MIB,  # what an answer to these may hold, and a copy of it
        )
    ]


def ends(step):
    return Case(
        "killed after that", "resumes", [{"point": "update.enter", "action": "kill", "step": step, "rank": 1}]
    )


def lost_in_a_publish(action, step):
    """It is given the whole version again once it answers."""
    return Case(
        f"a bucket answered once with {action}",
        "goes on",
        [wrong(action, step, "ack")],
        says=rf"(?s)version {step}: engine replica 0 is lost: [^\n]*RemoteProtocolError.*version {step}: "
        "engine replica 0 was restarted and generates again",
    )


ONCE = [action for action in ACTIONS if action != "silence"]  # which loses the server
AFTER = len(ONCE) + 1
# one of each way to an end; that all are told is seen where they come once
FOR_EVER = (
    *("null", "a version from the future", "an id beyond the vocabulary", "an empty completion", "not JSON"),
    *("an error of the server", "400 MB", "a dropped connection"),
)
LAST = AFTER + len(FOR_EVER)

ANSWERS = Chain(
    "answers",
    2,
    # what is found again was saved by the end alone
    ["parallel.tp=2", "checkpoint.every=1000", *ENGINE],
    [
        [once(number, action) for number, action in enumerate(ONCE, start=1)] + for_ever("silence", AFTER),
        *(for_ever(action, AFTER + number) for number, action in enumerate(FOR_EVER, start=1)),
        in_a_publish("null", LAST + 1, rf"{WHERE}the answer = None"),
        in_a_publish("not JSON", LAST + 2, rf"{WHERE}the answer is not JSON", "commit"),
        in_a_publish("a dropped connection", LAST + 3, rf"{WHERE}RemoteProtocolError"),
        in_a_publish("400 MB", LAST + 5, rf"{WHERE}the answer is larger than \d+ bytes"),
        [lost_in_a_publish("a dropped connection", LAST + 6), ends(LAST + 7)],
    ],
    fake_engines=1,
)

ANSWERS_OF_TWO = Chain(
    "two answering",
    2,
    ["parallel.tp=1", "checkpoint.every=1", *ENGINE],
    [
        [
            Case(
                f"one of two answers with {action} for ever: the other one generates all",
                "goes on",
                [wrong(action, step, times=None, server=1)],
                growth_mib=GROWTH_MIB,
            ),
            ends(step + 1),
        ]
        for step, action in ((1, "a version from the future"), (3, "a dropped connection"), (5, "400 MB"))
    ],
    fake_engines=2,
)

SHORT_ANSWERS = Chain(
    "short answers",
    2,
    ["parallel.tp=2", "checkpoint.every=1000", *ENGINE],
    [
        [
            once(1, "null"),
            lost_in_a_publish("a dropped connection", 2),
            *for_ever("400 MB", 3),
        ],
        in_a_publish("not JSON", 4, rf"{WHERE}the answer is not JSON"),
    ],
    fake_engines=1,
)
