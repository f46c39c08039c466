"""Sequential comparison of two policies by pairs of episodes from the same starts, valid whenever it ends.

Bets on the paired difference of successes, at odds that are fair where its mean is as supposed. Then the capital is a
nonnegative martingale, and it ever reaches 1 / ERROR with a probability of at most ERROR (Ville's inequality), however
often it is looked at: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2024). With
mean 0 it is the mixture likelihood ratio of a coin against a fair one, with a uniform prior, on the pairs of which one
episode succeeded (Robbins 1970).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ERROR = 0.05  # probability of a verdict on policies that are equally good
_BETS = np.arange(-199, 200, 2) / 200  # shares of what may be staked: a mixture of martingales is a martingale
_MEANS, _CELL = _BETS, 0.01  # mean differences that an interval is made of, as cells of this width
_MOST = 700.0  # logarithm of the largest capital; beyond it exp overflows


class Pairs(NamedTuple):
    """Pairs of episodes, by which of the two policies succeeded."""

    second_alone: int
    first_alone: int
    ties: int  # both, or neither

    @classmethod
    def of(cls, first: np.ndarray, second: np.ndarray) -> Pairs:
        """Count paired successes, bool[N] each."""
        return cls(int((second & ~first).sum()), int((first & ~second).sum()), int((first == second).sum()))

    def capital(self, mean: float | np.ndarray = 0.0) -> np.ndarray:
        """Return the capital of bets against a mean paired difference (second - first), for each of `mean`, in -1..1.

        It begins at 1.
        """
        m = np.asarray(mean)[..., None]
        stake = _BETS / np.where(_BETS > 0, 1 + m, 1 - m)  # all of it can be lost, and no more
        logs = self.second_alone * np.log1p(stake * (1 - m)) + self.first_alone * np.log1p(-stake * (1 + m))
        logs += self.ties * np.log1p(-stake * m)
        return np.asarray(np.exp(np.minimum(logs, _MOST)).mean(axis=-1))

    @property
    def difference(self) -> float:
        """Share of successes of the second policy less that of the first; 0 without pairs."""
        return (self.second_alone - self.first_alone) / max(1, sum(self))

    @property
    def decided(self) -> bool:
        """Whether one policy is better: `capital` of no difference has reached 1 / ERROR."""
        return float(self.capital()) >= 1 / ERROR

    @property
    def interval(self) -> tuple[float, float]:
        """The lowest and highest mean difference, second - first, that is not refuted at 1 - ERROR."""
        kept = _MEANS[self.capital(_MEANS) < 1 / ERROR]
        measured = self.difference  # is never refuted
        return float(min(measured, *kept - _CELL / 2)), float(max(measured, *kept + _CELL / 2))

    def to_json(self) -> dict[str, int | bool]:
        return {"pairs": sum(self), **self._asdict(), "decided": self.decided}
