"""The rule by which a round ends.

Each waiting call brings its rule, and the round ends for the first call in the queue once that call's rule is met. It
is asked after every change of a round, under the lock of the accumulator, so it decides at once and by its arguments
alone.
"""

from dataclasses import dataclass

from gradserve_server.accumulators.rounds import Members
from gradserve_server.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class ClosingRule:
    """Ends a round that has enough gradients.

    Attributes:
        num_required: The number of gradients that are enough.

    Raises:
        InvalidArgumentError: It is not positive.
    """

    num_required: int

    def __post_init__(self) -> None:
        if self.num_required <= 0:
            raise InvalidArgumentError(  # TensorFlow's message
                f"Argument num_required must be positive, but was {self.num_required}", field="num_required"
            )

    def is_met(self, members: Members) -> bool:
        """Returns True if a round with these members can end."""
        return members.count >= self.num_required
