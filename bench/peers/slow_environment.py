"""An environment that answers late, as TRL's `environment_factory` takes it; ours and TRL's loop run this very class.

Half of its answers take longer than 50 ms, one in twenty takes 1 s. Latencies are a function of the row's seed.
"""

import random
import time


class Slow:
    def reset(self, seed: int, **row: object) -> None:
        self._random, self.calls = random.Random(seed), 0

    def look(self, at: int) -> str:
        """Looks somewhere.

        Args:
            at: where
        """
        self.calls += 1
        time.sleep(1.0 if self._random.random() < 0.05 else 0.05 * self._random.lognormvariate(0.0, 0.3))
        return "empty"

    def get_reward(self) -> float:
        return 0.0
