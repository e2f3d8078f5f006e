"""Make the word problems of this folder, in GSM8K's format: 48 to train on and 16 held out.

The texts and numbers are ours, drawn with a fixed seed, so that the example runs before any data set has been
fetched. Training and held-out problems have no question in common.

Usage: python examples/gsm8k/make_sample.py
"""

import random
from pathlib import Path

from prepare import write_rows

TRAIN, HELD_OUT = 48, 16
NAMES = ("Ada", "Boris", "Chiara", "Dev", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jun")


def shopping(draws: random.Random, name: str) -> tuple[str, list[str], int]:
    """Price times count, then change from a note."""
    count, price = draws.randint(2, 9), draws.randint(2, 9)
    cost, paid = count * price, 100
    question = (
        f"{name} buys {count} notebooks that cost ${price} each and pays with a ${paid} note. How "
        "many dollars of change are due?"
    )
    return (
        question,
        [
            f"The notebooks cost {count} * {price} = {cost} dollars.",
            f"The change is {paid} - {cost} dollars.",
        ],
        paid - cost,
    )


def garden(draws: random.Random, name: str) -> tuple[str, list[str], int]:
    """Rows of plants, some of which wither."""
    rows, plants, lost = draws.randint(3, 9), draws.randint(5, 12), draws.randint(2, 9)
    total = rows * plants
    question = (
        f"{name} plants {rows} rows of {plants} tomatoes. In a cold night {lost} of them wither. How "
        "many tomato plants are left?"
    )
    return (
        question,
        [f"There were {rows} * {plants} = {total} plants.", f"After the frost {total} - {lost} are left."],
        total - lost,
    )


def savings(draws: random.Random, name: str) -> tuple[str, list[str], int]:
    """Weeks until a sum is reached."""
    weekly, weeks, begun = draws.randint(3, 15), draws.randint(3, 12), draws.randint(5, 40)
    goal = begun + weekly * weeks
    question = (
        f"{name} has ${begun} and saves ${weekly} a week. After how many weeks is there enough for a "
        f"lamp that costs ${goal}?"
    )
    steps = [
        f"Still missing are {goal} - {begun} = {goal - begun} dollars.",
        f"That takes {goal - begun} / {weekly} weeks.",
    ]
    return question, steps, weeks


def journey(draws: random.Random, name: str) -> tuple[str, list[str], int]:
    """Two legs at different speeds."""
    speed, hours, second = draws.randint(4, 20), draws.randint(2, 6), draws.randint(3, 30)
    first = speed * hours
    question = (
        f"{name} cycles for {hours} hours at {speed} km an hour, rests, and cycles another {second} km. How "
        "many km is the whole journey?"
    )
    return (
        question,
        [f"The first leg is {speed} * {hours} = {first} km.", f"Together that is {first} + {second} km."],
        first + second,
    )


def sharing(draws: random.Random, name: str) -> tuple[str, list[str], int]:
    """A total shared out equally after some is kept."""
    friends, each, kept = draws.randint(3, 8), draws.randint(3, 12), draws.randint(2, 15)
    total = friends * each + kept
    question = (
        f"{name} has {total} stickers, keeps {kept} and shares the others equally among {friends} "
        "friends. How many does each get?"
    )
    steps = [
        f"To give away are {total} - {kept} = {total - kept}.",
        f"Each friend gets {total - kept} / {friends}.",
    ]
    return question, steps, each


KINDS = (shopping, garden, savings, journey, sharing)


def make_rows() -> list[dict]:
    """Return TRAIN + HELD_OUT different problems."""
    draws, rows = random.Random(0), {}
    while len(rows) < TRAIN + HELD_OUT:
        question, steps, answer = KINDS[len(rows) % len(KINDS)](draws, draws.choice(NAMES))
        rows[question] = {"question": question, "answer": "\n".join([*steps, f"#### {answer}"])}
    return list(rows.values())


if __name__ == "__main__":
    folder, problems = Path(__file__).parent, make_rows()
    write_rows(folder / "sample.jsonl", problems[:TRAIN])
    write_rows(folder / "sample_eval.jsonl", problems[TRAIN:])
