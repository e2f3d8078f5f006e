"""Which source of a mixture gives the next prompt: a function of the position alone, so that a run goes on
from one number.

Weights are made whole numbers; a cycle has so many prompts of each source, as evenly spread as they can be.
Every source has epochs of its own: all of its prompts are used before one comes again.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

from megagrpo.errors import UserError

LONGEST_CYCLE = 100_000


class MixtureCycle:
    """The repeating order of sources.

    Example:
        >>> cycle = MixtureCycle([2.0, 1.0])
        >>> [cycle.locate(position) for position in range(6)]
        [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    """

    def __init__(self, weights: Sequence[float]):
        """Lay out a cycle.

        Raises:
            UserError: a whole number of prompts of each source needs a cycle that is too long.
        """
        parts = [Fraction(str(weight)) for weight in weights]
        common = lcm(*(part.denominator for part in parts))
        counts = [int(part * common) for part in parts]
        counts = [count // gcd(*counts) for count in counts]
        if sum(counts) > LONGEST_CYCLE:
            raise UserError(
                f"data.mixture: weights {', '.join(f'{weight:g}' for weight in weights)}: their shares are "
                f"whole in {sum(counts)} prompts, at most {LONGEST_CYCLE} are allowed; round the weights"
            )
        # the j-th of n draws of a source belongs at (j + 1/2) / n of the cycle
        places = sorted(
            (Fraction(2 * draw + 1, 2 * count), source, draw)
            for source, count in enumerate(counts)
            for draw in range(count)
        )
        self.counts, self._order = counts, [(source, draw) for _, source, draw in places]

    def locate(self, position: int) -> tuple[int, int]:
        """Return (source, how many prompts were drawn of it before) of the prompt at `position`."""
        cycle, offset = divmod(position, len(self._order))
        source, draw = self._order[offset]
        return source, cycle * self.counts[source] + draw
