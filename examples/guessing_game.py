"""A game of several turns as an environment of TRL: the model guesses a number, and is told whether it is too low.

Use it in a run file as ``environment_factory: guessing_game:GuessingGame``, with ``headrace up`` started in this
directory. guessing-game-qwen3-0.6b.yaml is such a run file.
"""

from typing import Any

MAX_GUESSES = 8


class GuessingGame:
    """One game. Each rollout has its own."""

    def reset(self, secret: int, highest: int, **_columns: Any) -> str:
        """Begin a game with the number of the data set's row. The text that is returned is appended to the prompt."""
        self.secret, self.highest = secret, highest
        self.guesses: list[int] = []
        return f" It is a whole number from 1 to {highest}. You have {MAX_GUESSES} guesses."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            Whether the guess is too low, too high or right.
        """
        if self.secret in self.guesses or len(self.guesses) == MAX_GUESSES:
            raise ValueError("The game is over.")
        if number not in range(1, self.highest + 1):  # the model may write any JSON, whatever the type hint says
            raise ValueError(f"A guess is a whole number from 1 to {self.highest}.")
        self.guesses.append(number)
        if number == self.secret:
            return "Right."
        return "Too low." if number < self.secret else "Too high."

    def get_reward(self) -> float:
        """Return 1 for the number at the first guess, a tenth less for each further guess, and 0 without the number."""
        return 1.0 - 0.1 * self.guesses.index(self.secret) if self.secret in self.guesses else 0.0


def closeness(environments: list[Any], **_columns: Any) -> list[float]:
    """Prefer last guesses near the number: 1 for the number itself, falling to 0. No guess is a 0, too."""
    return [
        max(0.0, 1.0 - abs(game.guesses[-1] - game.secret) / game.highest) if game.guesses else 0.0
        for game in environments
    ]
